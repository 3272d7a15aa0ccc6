"""Model families as plain modules: no parallel code and no config object inside, a plan as data beside each."""

from libai.models.mlp import MLP as MLP
from libai.models.mlp import MLP_PLAN as MLP_PLAN
from libai.models.text.bert import BERT as BERT
from libai.models.text.bert import BERT_PLAN as BERT_PLAN
from libai.models.text.bert import BERTClassifier as BERTClassifier
from libai.models.text.bert import BERTEmbedder as BERTEmbedder
from libai.models.text.gpt import GPT as GPT
from libai.models.text.gpt import GPT_PLAN as GPT_PLAN
from libai.models.text.llama import LLAMA_PLAN as LLAMA_PLAN
from libai.models.text.llama import Llama as Llama
from libai.models.text.t5 import T5 as T5
from libai.models.text.t5 import T5_ENCODER_PLAN as T5_ENCODER_PLAN
from libai.models.text.t5 import T5_PLAN as T5_PLAN
from libai.models.text.t5 import T5Encoder as T5Encoder
from libai.models.vision.alexnet import ALEXNET_PLAN as ALEXNET_PLAN
from libai.models.vision.alexnet import AlexNet as AlexNet
from libai.models.vision.resnet import RESNET_PLAN as RESNET_PLAN
from libai.models.vision.resnet import ResNet as ResNet
from libai.models.vision.swin import SWIN_PLAN as SWIN_PLAN
from libai.models.vision.swin import SWINV2_PLAN as SWINV2_PLAN
from libai.models.vision.swin import Swin as Swin
from libai.models.vision.swin import SwinV2 as SwinV2
from libai.models.vision.vit import VIT_PLAN as VIT_PLAN
from libai.models.vision.vit import ViT as ViT
