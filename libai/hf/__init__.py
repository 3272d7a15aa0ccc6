"""Models and weights of Hugging Face: into libai, out of it with the same bytes, and compared with `transformers`.

Only JSON and raw numbers are read. docs/inference.md says which architectures there are.
"""

from libai.hf.convert import export_folder, import_folder, load_pretrained, model_config
from libai.hf.files import read_folder
from libai.hf.verify import verify
