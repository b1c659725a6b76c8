"""Answers a file of prompts with Ray Data: a model for each worker, on a GPU each where there are some.

prompts.jsonl has a JSON object with a `prompt` a line; answers.jsonl gets it back with its answer. After a kill the
next run answers what is left.

python ray_batch.py model.gguf prompts.jsonl answers.jsonl --workers 4
"""

import argparse
import json
import os
from pathlib import Path

import ray
import ray.data


class Answers:
    """A worker: a model in its process, which answers the prompts of a batch together."""

    def __init__(self, model: str, gpu: bool, threads: int, options: argparse.Namespace) -> None:
        from kvflash_ggml import Engine, KVFlashConfig, Llama, Sampling

        config = KVFlashConfig(pool=options.pool, parallel=options.parallel)
        layers = -1 if gpu else 0
        llm = Llama(model, n_ctx=options.context, n_gpu_layers=layers, n_threads=threads, kvflash=config, verbose=False)
        self.engine, self.sampling, self.max_tokens = Engine(llm), Sampling(temperature=0), options.max_tokens

    def __call__(self, batch: dict) -> dict:
        answers = self.engine.generate_many(batch["prompt"].tolist(), self.sampling, max_tokens=self.max_tokens)
        told = {name: [getattr(one, name) for one in answers] for name in ("text", "reason", "error")}
        return {"number": batch["number"], "worker": [os.getpid()] * len(answers), **told}


def answered(file: Path, prompts: list[dict]) -> set[int]:
    """The numbers of the prompts that have an answer. The line that a kill has cut off is taken away."""
    if not file.exists():
        return set()
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    os.truncate(file, len(whole))
    known = [json.loads(line) for line in whole.splitlines()]
    for one in known:
        number = one["number"]
        if number >= len(prompts) or prompts[number]["prompt"] != one["prompt"]:
            raise SystemExit(f"{file}: answer {number} is of another prompt: name another file for the answers")
    return {one["number"] for one in known}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file, at the same path on each machine")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--workers", type=int, default=0, help="0: one a GPU, or one where there is none")
    parser.add_argument("--pool", type=int, default=4096, help="tokens of each worker's pool")
    parser.add_argument("--context", type=int, default=8192, help="most tokens of a prompt and its answer")
    parser.add_argument("--parallel", type=int, default=4, help="answers that a worker computes together")
    parser.add_argument("--batch", type=int, default=16, help="prompts that a kill may cost a worker")
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args()

    prompts = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines()]
    known = answered(options.answers, prompts)
    left = [
        {"number": number, "prompt": prompts[number]["prompt"]} for number in range(len(prompts)) if number not in known
    ]
    print(f"{len(known)} of {len(prompts)} prompts are answered", flush=True)
    if not left:
        return

    ray.init(ignore_reinit_error=True)  # RAY_ADDRESS names a cluster; without it one is started here
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(one.get("GPU", 0) for one in machines))
    workers = options.workers or max(1, gpus)
    gpu = gpus >= workers
    beside = -(-workers // len(machines))
    threads = max(1, int(min(one.get("CPU", 1) for one in machines)) // beside)
    batches = -(-len(left) // options.batch)
    answers = ray.data.from_items(left, override_num_blocks=max(workers, batches)).map_batches(
        Answers,
        fn_constructor_args=(str(options.model.resolve()), gpu, threads, options),
        batch_size=options.batch,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_gpus=1 if gpu else 0,
        num_cpus=0 if gpu else threads,
    )
    with options.answers.open("a", encoding="utf-8") as file:
        for row in answers.iter_rows():
            print(json.dumps({**prompts[row["number"]], **row}), file=file, flush=True)


if __name__ == "__main__":
    main()
