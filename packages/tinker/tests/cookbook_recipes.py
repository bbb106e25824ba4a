"""Runs one recipe of tinker-cookbook, unmodified but for server, model, renderer and local data; see test_cookbook.py.

python cookbook_recipes.py RECIPE BASE_URL MODEL     in a folder with the data sets, for tinker-cookbook's own Python
"""

import asyncio
import json
import pathlib
import sys

recipe, base_url, model = sys.argv[1:4]
common = {"model_name": model, "base_url": base_url, "log_path": f"logs/{recipe}"}


def sl_basic():
    from tinker_cookbook.recipes import sl_basic
    from tinker_cookbook.supervised.data import FromConversationFileBuilder
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

    data = FromConversationFileBuilder(
        common_config=ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=model, renderer_name="role_colon", max_length=256, batch_size=4
        ),
        file_path="conversations.jsonl",
    )
    settings = {"renderer_name": "role_colon", "dataset_builder": data, "lora_rank": 8, "learning_rate": 1e-3}
    settings |= {"max_steps": 5, "num_epochs": 5, "eval_every": 0, "save_every": 0, "session_name": "sl"}
    sl_basic.main(sl_basic.build_config_blueprint("Qwen/Qwen3-8B").apply(common | settings).make())
    dataset, _ = data()
    dataset.set_epoch(seed=0)
    rows = [
        [
            {
                "tokens": datum.model_input.to_ints(),
                "targets": datum.loss_fn_inputs["target_tokens"].data,
                "weights": datum.loss_fn_inputs["weights"].data,
            }
            for datum in dataset.get_batch(index)
        ]
        for index in range(5)
    ]
    pathlib.Path("logs/sl_basic/batches.json").write_text(json.dumps(rows))


def rl_basic():
    from tinker_cookbook.recipes import rl_basic
    from tinker_cookbook.recipes.math_rl.math_env import Gsm8kDatasetBuilder

    data = Gsm8kDatasetBuilder(batch_size=2, group_size=4, renderer_name="role_colon", model_name_for_tokenizer=model)
    settings = {"renderer_name": "role_colon", "dataset_builder": data, "lora_rank": 8, "max_tokens": 12}
    settings |= {"max_steps": 2, "save_every": 0, "session_name": "rl"}
    rl_basic.main(rl_basic.build_config_blueprint("Qwen/Qwen3-8B").apply(common | settings).make())


def rl_loop():
    from tinker_cookbook.recipes import rl_loop

    rl_loop.main(
        rl_loop.Config(
            **common, batch_size=2, group_size=4, max_tokens=12, lora_rank=8, max_steps=2, save_every=1,
            loss_fn="importance_sampling",
        )
    )  # fmt: skip


def distillation():
    from tinker_cookbook.recipes.distillation import on_policy_distillation

    config = on_policy_distillation.CLIConfig(
        **common, teacher_model=model, renderer_name="role_colon", dataset="deepmath", group_size=2,
        groups_per_batch=2, max_tokens=12, lora_rank=8, eval_every=0, save_every=0, max_steps=2,
    )  # fmt: skip
    asyncio.run(on_policy_distillation.cli_main(config))


def preference():
    from tinker_cookbook.recipes.preference.dpo import train

    train.cli_main(
        train.CLIConfig(
            **common, dataset="hhh", renderer_name="role_colon", batch_size=2, max_length=128, max_steps=2,
            reference_model_name=model,
        )
    )  # fmt: skip


globals()[recipe]()
