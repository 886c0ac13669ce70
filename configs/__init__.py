"""YAML and data that come with the package, installed as ``mindspeed_odpo.configs``."""
