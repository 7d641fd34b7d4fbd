"""Returns text where records are expected."""

from polysilicon.api import hookimpl


@hookimpl
def polysilicon_devices():
    return ["acme"]
