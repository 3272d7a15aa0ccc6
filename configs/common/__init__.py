"""Settings and parts that experiment configs import: `from .common.train import train`."""
