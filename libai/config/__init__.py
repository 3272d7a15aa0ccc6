"""Configuration: lazy configs in Python files, overrides, and a typed schema that catches mistakes
early.

Importing this package does not import oneflow, but a config file may.
"""

from libai.config.batch import (
    BatchSizes,
    batch_sizes_of,
    solve_batch_sizes,
    solve_data_parallel_size,
)
from libai.config.instantiation import fill_unset, instantiate, locate, target_of
from libai.config.lazy_config import LazyCall, LazyConfig, get_config
from libai.config.overrides import format_override
from libai.config.settings import schema
from libai.config.settings.errors import ConfigError
from libai.config.settings.schema import defaults
from libai.config.validation import RunConfig, load_config, validate
from libai.launch.command_line import Args, parse_args
