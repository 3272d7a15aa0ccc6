"""Every `train` setting with its default; `libai/config/settings` says what each one means."""

from libai.config import defaults

train = defaults("train")
