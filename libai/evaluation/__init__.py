"""Evaluators: from batches and model outputs to metrics that are exact for any batch size and number of ranks."""

from libai.evaluation.classification import ClassificationEvaluator as ClassificationEvaluator
from libai.evaluation.classification import ConfusionMatrixEvaluator as ConfusionMatrixEvaluator
from libai.evaluation.evaluator import Evaluator as Evaluator
from libai.evaluation.evaluator import EvaluatorError as EvaluatorError
from libai.evaluation.evaluator import add_sums as add_sums
from libai.evaluation.evaluator import evaluators_of as evaluators_of
from libai.evaluation.evaluator import reduce_sums as reduce_sums
from libai.evaluation.losses import MeanLossEvaluator as MeanLossEvaluator
from libai.evaluation.losses import PerplexityEvaluator as PerplexityEvaluator
from libai.evaluation.metric_objects import MetricEvaluator as MetricEvaluator
from libai.evaluation.metric_objects import is_metric as is_metric
from libai.evaluation.regression import RegressionEvaluator as RegressionEvaluator
from libai.evaluation.translation import BleuEvaluator as BleuEvaluator
