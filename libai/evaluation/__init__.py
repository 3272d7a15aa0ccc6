"""Evaluators: from batches and model outputs to metrics that are exact for any batch size and number of ranks."""

from libai.evaluation.classification import ClassificationEvaluator as ClassificationEvaluator
from libai.evaluation.classification import ConfusionMatrixEvaluator as ConfusionMatrixEvaluator
from libai.evaluation.evaluator import Evaluator as Evaluator
from libai.evaluation.evaluator import EvaluatorError as EvaluatorError
from libai.evaluation.evaluator import add_sums as add_sums
from libai.evaluation.losses import MeanLossEvaluator as MeanLossEvaluator
from libai.evaluation.losses import PerplexityEvaluator as PerplexityEvaluator
from libai.evaluation.regression import RegressionEvaluator as RegressionEvaluator
