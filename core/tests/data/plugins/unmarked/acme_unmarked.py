"""Forgot the mark above its hook."""


def polysilicon_devices():
    return []
