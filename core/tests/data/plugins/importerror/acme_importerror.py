"""Cannot be imported: its toolchain is missing."""

import acme_toolchain_that_is_not_installed  # noqa: F401
