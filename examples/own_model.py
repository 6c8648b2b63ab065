"""A definition of your own: a module with Model and ModelArgs, built of mlx-lm's parts. Usage: python own_model.py"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from mlx_lm.models import qwen3_moe
from mlx_lm.models.qwen3_moe import ModelArgs  # noqa: F401  # a definition needs one

from mlxmoe import load, register


class Model(qwen3_moe.Model):
    """Qwen3's Mixture of Experts, but the last layer asks two experts only."""

    def __init__(self, args):
        super().__init__(args)
        self.model.layers[-1].mlp.top_k = 2


register("my_moe", sys.modules[__name__])
with tempfile.TemporaryDirectory() as folder, load() as demo:
    shutil.copytree(demo.path, folder, dirs_exist_ok=True)
    Path(folder, "config.json").write_text(json.dumps({**demo.config, "model_type": "my_moe"}))
    with load(folder, experts="25%") as mine:
        print("Qwen3's:", demo.generate("In the beginning", max_tokens=20))
        print("Mine:", mine.generate("In the beginning", max_tokens=20))
