"""Recipes, the training loop, checkpoints, evaluation and export."""

from plsc.train.checkpoint import Checkpoints, load, save
from plsc.train.config import Config, load_recipe
from plsc.train.trainer import Trainer

__all__ = ["Checkpoints", "Config", "Trainer", "load", "load_recipe", "save"]
