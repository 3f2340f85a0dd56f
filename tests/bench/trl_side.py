"""TRL's GRPOTrainer on the sums of recipes/sums.toml: seconds between optimizer steps. Runs in .venv-trl; prints JSON.

Run by bench_trl.py: trl_side.py JSON, with the settings as one JSON object. Of this project it imports the
reward alone.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main() -> int:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    import torch
    import transformers
    import trl
    from datasets import Dataset

    torch.set_num_threads(settings["threads"])
    transformers.set_seed(settings["seed"])
    rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["input"]}], "label": row["label"]} for row in rows]
    )
    reward = runpy.run_path(settings["reward"])["reward"]

    def rewards(prompts: list[Any], completions: list[Any], label: list[str], **_: Any) -> list[float]:
        samples = zip(prompts, completions, label, strict=True)
        return [
            reward(SimpleNamespace(prompt=prompt[0]["content"], response=completion[0]["content"], label=each))
            for prompt, completion, each in samples
        ]

    times: list[tuple[float, float]] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append((time.time(), sum(os.times()[:2])))

    is_bf16 = settings["dtype"] == "bfloat16"
    config = trl.GRPOConfig(
        output_dir=settings["out"],
        model_init_kwargs={"dtype": settings["dtype"]},
        bf16=is_bf16,
        use_cpu=True,
        gradient_checkpointing=False,  # slower, and the memory suffices
        per_device_train_batch_size=settings["per_device"],
        gradient_accumulation_steps=settings["samples"] * settings["prompts"] // settings["per_device"],
        num_generations=settings["samples"],
        max_completion_length=settings["max_response_len"],
        max_steps=settings["steps"],
        learning_rate=settings["lr"],
        weight_decay=0.0,
        lr_scheduler_type="constant",
        loss_type="grpo",  # the mean over samples of their means over tokens
        beta=0.0,
        temperature=1.0,
        seed=settings["seed"],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    adapter = None
    if settings["lora"] is not None:
        import peft

        adapter = peft.LoraConfig(task_type="CAUSAL_LM", **settings["lora"])
    trainer = trl.GRPOTrainer(
        model=settings["model"],
        reward_funcs=rewards,
        args=config,
        train_dataset=data,
        callbacks=[Clock()],
        peft_config=adapter,
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    print(
        json.dumps(
            {
                "versions": {
                    "trl": trl.__version__,
                    "transformers": transformers.__version__,
                    "torch": torch.__version__,
                },
                "times": [wall for wall, _ in times],
                "cpu": [cpu for _, cpu in times],
                "rewards": [round(entry["reward"], 3) for entry in logs],
                "response_tokens": [round(entry["completions/mean_length"], 2) for entry in logs],
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
