"""Model families as plain modules: no parallel code and no config object inside, a plan as data beside each."""

from libai.models.alexnet import ALEXNET_PLAN as ALEXNET_PLAN
from libai.models.alexnet import AlexNet as AlexNet
from libai.models.bert import BERT as BERT
from libai.models.bert import BERT_PLAN as BERT_PLAN
from libai.models.bert import BERTClassifier as BERTClassifier
from libai.models.bert import BERTEmbedder as BERTEmbedder
from libai.models.bert import MaskedTokens as MaskedTokens
from libai.models.gpt import GPT as GPT
from libai.models.gpt import GPT_PLAN as GPT_PLAN
from libai.models.llama import LLAMA_PLAN as LLAMA_PLAN
from libai.models.llama import Llama as Llama
from libai.models.mlp import MLP as MLP
from libai.models.mlp import MLP_PLAN as MLP_PLAN
from libai.models.resnet import RESNET_PLAN as RESNET_PLAN
from libai.models.resnet import ResNet as ResNet
from libai.models.vit import VIT_PLAN as VIT_PLAN
from libai.models.vit import ViT as ViT
