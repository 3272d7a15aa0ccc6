"""Models and weights of Hugging Face: into libai, out of it with the same bytes, and compared with `transformers`.

Only JSON and raw numbers are read. docs/pretrained.md says which architectures there are.
"""

from libai.hf.adapters import export_adapters as export_adapters
from libai.hf.convert import export_folder as export_folder
from libai.hf.convert import import_folder as import_folder
from libai.hf.convert import load_pretrained as load_pretrained
from libai.hf.convert import model_config as model_config
from libai.hf.files import read_folder as read_folder
from libai.hf.verify import verify as verify
