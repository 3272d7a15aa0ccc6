"""Every `train` setting with its default. `libai/config/settings` describes them."""

from libai.config import defaults

train = defaults("train")
