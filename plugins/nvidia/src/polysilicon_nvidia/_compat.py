"""The only place that may ask which core is installed. Every supported core is alike so far."""
