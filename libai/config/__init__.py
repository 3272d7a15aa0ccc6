"""Configuration: lazy configs in Python files, overrides, and a typed schema that catches mistakes early.

Importing this package does not import oneflow; a config file may.
"""

from libai.config.arguments import Args as Args
from libai.config.arguments import parse_args as parse_args
from libai.config.combinations import BatchSizes as BatchSizes
from libai.config.combinations import solve_batch_sizes as solve_batch_sizes
from libai.config.combinations import solve_data_parallel_size as solve_data_parallel_size
from libai.config.errors import ConfigError as ConfigError
from libai.config.instantiation import fill_unset as fill_unset
from libai.config.instantiation import instantiate as instantiate
from libai.config.instantiation import locate as locate
from libai.config.instantiation import target_of as target_of
from libai.config.lazy import LazyCall as LazyCall
from libai.config.lazy import LazyConfig as LazyConfig
from libai.config.lazy import get_config as get_config
from libai.config.overrides import format_override as format_override
from libai.config.schema import defaults as defaults
from libai.config.validation import RunConfig as RunConfig
from libai.config.validation import validate as validate
