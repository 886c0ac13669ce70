"""Patches for hosts, installed as ``mindspeed_odpo.patches``: one subject per file. None is needed on plain megatron-core."""
