"""Settings and parts that experiments start from: `from .common.train import train`."""
