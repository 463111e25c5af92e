"""Click prediction in one process: threads share a sparse table and a dense net, without locks on the weights."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from plsc.data.clicks import Batch, Clicks
from plsc.fleet import NonFiniteLoss
from plsc.models.clicks import CLICK_MODELS
from plsc.ps import Served, SparseEmbedding, Table, export
from plsc.train.build import Progress
from plsc.train.click_metrics import Auc, GroupAuc, LogLoss
from plsc.train.config import from_dict, to_dict
from plsc.train.ctr_config import CtrConfig, click_format, load_attr, make_table, open_clicks, table_options
from plsc.train.metrics_log import MetricsLog
from plsc.train.plots import plot_loss, read_records

logger = logging.getLogger(__name__)


class CtrTrainer:
    """Table, model, readers and place of a run.

    Each thread has a model and an optimizer whose weights and moments are the same memory as the others', and gradients
    of its own: updates may overwrite each other (Hogwild, Niu et al. 2011). One thread gives the same bits every time.
    """

    def __init__(self, config: CtrConfig, *, progress: Progress | None = None) -> None:
        self.config = config
        self.out = Path(config.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.train_data, self.test_data = open_clicks(config)
        self.step = 0
        self.table = make_table(config)
        self._progress = progress
        self._log = MetricsLog(self.out)
        self._lock = threading.Lock()
        newest = _newest(self.out) if config.resume else None
        if newest is not None:
            self.table = _saved_table(newest / "table", self.table, config)
        torch.manual_seed(config.seed)
        self.models = [build_model(config, self.table, self.train_data) for _ in range(config.threads)]
        self.optimizers = [
            torch.optim.Adam(model.parameters(), lr=config.dense.lr, weight_decay=config.dense.weight_decay)
            for model in self.models
        ]
        for model in self.models[1:]:
            for mine, shared in zip(_tensors(model).values(), _tensors(self.models[0]).values(), strict=True):
                mine.data = shared.data
        if newest is not None:
            self._restore(newest)

    def fit(self) -> dict[str, float]:
        """Trains, evaluates and saves after each epoch; what the last evaluation found."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the cores are taken by training threads, and one thread's bits stay the same
        result: dict[str, float] = {}
        self._log.open(self.step)
        try:
            with ThreadPoolExecutor(self.config.threads, thread_name_prefix="train") as pool:
                while self.train_data.epoch < self.config.epochs and not self._over():
                    ended = self._epoch(pool)
                    result = self.evaluate()
                    if self.step == 0:
                        raise ValueError(f"got no rows to train on in {', '.join(self.train_data.files)}")
                    told = {f"test_{name}": x for name, x in result.items() if not math.isnan(x)}
                    self._log.write({"step": self.step, **told})
                    said = ", ".join(f"{name} {x:.4f}" for name, x in result.items())
                    logger.info("epoch %d, step %d, held out: %s", self.train_data.epoch, self.step, said)
                    self.save()
                    if not ended:
                        break
        except KeyboardInterrupt:
            self.save()
            raise
        finally:
            torch.set_num_threads(threads)
            self._log.close()
        return result or self.evaluate()

    def evaluate(self) -> dict[str, float]:
        """auc, log_loss, calibration and, with data.group, group_auc on the held-out part; creates no rows."""
        model, auc, group_auc, log_loss = self.models[0].eval(), Auc(), GroupAuc(), LogLoss()
        group = self.config.data.group
        with torch.no_grad():
            for dense, ids, clicked in self.test_data:
                logits = model(dense, ids).double().numpy()
                auc.update(logits, clicked)
                log_loss.update(logits, clicked)
                if group >= 0:
                    group_auc.update(logits, clicked, ids.reshape(*ids.shape[:2], -1)[:, group, 0])
        model.train()
        if math.isnan(auc.value()):
            logger.warning(
                "the held-out part has %d rows, all of one kind or none: it has no AUC; give data.test or a larger "
                "data.test_share",
                log_loss.samples,
            )
        found = {"auc": auc.value(), "log_loss": log_loss.value(), "calibration": log_loss.calibration()}
        return {**found, "group_auc": group_auc.value()} if group >= 0 else found

    def save(self) -> Path:
        """A checkpoint: table, dense weights, optimizer and place; a folder that appears whole or not at all."""
        folder = self.out / "checkpoints"
        place, partial = folder / f"step-{self.step:09d}", folder / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        self.table.save(partial / "table")
        tensors = {f"model.{name}": tensor for name, tensor in self._weights().items()}
        for i, state in enumerate(self._moments()):
            tensors |= {f"optimizer.{i}.{name}": tensor for name, tensor in state.items()}
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, partial / "dense.safetensors"
        )
        place_now = {"step": self.step, "reader": self.train_data.state_dict()}
        (partial / "state.json").write_text(json.dumps(place_now), encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)
        os.replace(partial, place)
        for old in _saved(self.out)[: -self.config.keep]:
            shutil.rmtree(old)
        return place

    # ---- inside

    def _over(self) -> bool:
        return 0 < self.config.max_steps <= self.step

    def _epoch(self, pool: ThreadPoolExecutor) -> bool:
        """The rest of a pass; False where max_steps ended it. Threads meet at every step that logs or saves."""
        batches = iter(self.train_data)
        epoch, every = self.train_data.epoch, self.config.save_every
        try:
            while not self._over():
                stops = [_next_multiple(self.step, self.config.log_every)]
                stops += [_next_multiple(self.step, every)] if every else []
                stops += [self.config.max_steps] if self.config.max_steps else []
                if not self._segment(pool, batches, min(stops)):
                    return True
                if every and self.step % every == 0:
                    self.save()
            return self.train_data.epoch > epoch
        finally:
            batches.close()  # type: ignore[attr-defined]

    def _segment(self, pool: ThreadPoolExecutor, batches: Iterator[Batch], stop: int) -> bool:
        """Trains up to step `stop`; False at the end of the pass."""
        start, auc, losses, failed = time.perf_counter(), Auc(), LogLoss(), threading.Event()
        share = self._share_moments()
        ended = False

        def work(i: int) -> None:
            nonlocal ended
            try:
                while not failed.is_set():
                    with self._lock:
                        batch = None if self.step >= (stop if share else min(stop, 1)) else next(batches, None)
                        if batch is None:
                            ended = ended or self.step < (stop if share else min(stop, 1))
                            return
                        self.step += 1
                    logits = self._train(i, *batch)
                    with self._lock:
                        auc.update(logits, batch[2])
                        losses.update(logits, batch[2])
            except BaseException:
                failed.set()
                raise

        # The first step makes the optimizer's moments; from then on the threads share them.
        threads = range(self.config.threads) if share else range(1)
        running = [pool.submit(work, i) for i in threads]
        try:
            for future in running:
                future.result()
        finally:
            failed.set()
        if losses.samples:
            self._report(auc, losses, time.perf_counter() - start)
        return not ended

    def _train(self, i: int, dense: Tensor, ids: Tensor, clicked: Tensor) -> np.ndarray:
        """One step by thread i; the logits from before it."""
        model, optimizer = self.models[i], self.optimizers[i]
        logits = model(dense, ids)
        loss = F.binary_cross_entropy_with_logits(logits, clicked)
        if not math.isfinite(loss.item()):
            raise NonFiniteLoss(f"the loss is {loss.item()} at step {self.step}; lower table.lr or dense.lr")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return logits.detach().double().numpy()

    def _report(self, auc: Auc, losses: LogLoss, seconds: float) -> None:
        """Progressive figures: every sample was predicted before it was learnt from."""
        record = {
            "step": self.step,
            "epoch": self.train_data.epoch + self.train_data.progress(),
            "loss": losses.value(),
            "auc": auc.value(),
            "samples_per_second": losses.samples / seconds,
            "rows": len(self.table),
            "malformed": self.train_data.malformed,
        }
        self._log.write({name: value for name, value in record.items() if not math.isnan(value)})
        if self._progress is not None and self.step > 1 and record["epoch"] > 0:
            total = max(self.step, round(self.step * self.config.epochs / record["epoch"]))
            self._progress(self.step, min(total, self.config.max_steps or total))

    def _share_moments(self) -> bool:
        """Lets all optimizers work on the first one's state; False before there is one."""
        first = self.optimizers[0]
        if not first.state:
            return False
        for model, optimizer in zip(self.models[1:], self.optimizers[1:], strict=True):
            for mine, shared in zip(model.parameters(), self.models[0].parameters(), strict=True):
                if shared in first.state:
                    optimizer.state[mine] = first.state[shared]
        return True

    def _weights(self) -> dict[str, Tensor]:
        return _tensors(self.models[0])

    def _moments(self) -> list[dict[str, Tensor]]:
        return [self.optimizers[0].state.get(parameter, {}) for parameter in self.models[0].parameters()]

    def _restore(self, place: Path) -> None:
        tensors = load_file(place / "dense.safetensors")
        wanted = self._weights()
        found = {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("model.")}
        if {n: t.shape for n, t in found.items()} != {n: t.shape for n, t in wanted.items()}:
            raise ValueError(f"{place} holds another model; give its settings, another out, or --no-resume")
        with torch.no_grad():
            for name, parameter in wanted.items():
                parameter.copy_(found[name])
        for i, parameter in enumerate(self.models[0].parameters()):
            start = f"optimizer.{i}."
            state = {name[len(start) :]: tensor for name, tensor in tensors.items() if name.startswith(start)}
            if state:
                self.optimizers[0].state[parameter] = state
        state = json.loads((place / "state.json").read_text(encoding="utf-8"))
        self.step = state["step"]
        self.train_data.load_state_dict(state["reader"])
        logger.info("continuing from %s", place)


def train(config: CtrConfig, *, progress: Progress | None = None) -> dict[str, float]:
    """A run from start to end; writes config.toml, metrics, checkpoints, result.json, loss.png and the export."""
    out = Path(config.out)
    trainer = CtrTrainer(config, progress=progress)  # which refuses settings that do not go with what `out` holds
    (out / "config.toml").write_text(tomli_w.dumps(to_dict(config)), encoding="utf-8")
    result = trainer.fit()
    truth = out / "data" / "truth.json"
    if config.data.kind == "synthetic":
        result["best_auc"] = json.loads(truth.read_text(encoding="utf-8"))["best_auc"]
    known = {name: None if math.isnan(x) else x for name, x in result.items()}  # JSON has no NaN
    text = json.dumps({"step": trainer.step, **known}, indent=2)
    (out / "result.json").write_text(text + "\n", encoding="utf-8")
    records = [record for record in read_records(out / "metrics.jsonl") if "loss" in record]
    if records:
        plot_loss(records, out / "loss.png")
    if config.export:
        export_model(trainer, out / "export")
    return result


def export_model(trainer: CtrTrainer, folder: Path) -> Path:
    """For serving: rows without optimizer state, dense weights, and the configuration that says what they are."""
    folder.mkdir(parents=True, exist_ok=True)
    export(trainer.table, folder / "table.safetensors", dtype=trainer.config.export_dtype)
    weights = {name: tensor.detach().contiguous() for name, tensor in trainer._weights().items()}
    save_file(weights, folder / "dense.safetensors")
    (folder / "config.toml").write_text(tomli_w.dumps(to_dict(trainer.config)), encoding="utf-8")
    return folder


def load_model(folder: str | os.PathLike[str]) -> nn.Module:
    """An exported model, called as model(dense, ids) for logits; its rows stay in the file, mapped."""
    import tomllib

    values = tomllib.loads((Path(folder) / "config.toml").read_text(encoding="utf-8"))
    config = from_dict(CtrConfig, values, where=f"{folder}/config.toml")
    format = click_format(config.data)
    model = build_model(config, Served(Path(folder) / "table.safetensors"), format)
    weights = load_file(Path(folder) / "dense.safetensors")
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            tensor.copy_(weights[name])
    return model.eval()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds beside rows: parameters and buffers (of batch norm, say), each once, by name."""
    state = {name: x for name, x in model.state_dict(keep_vars=True).items() if not name.endswith("_extra_state")}
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    return {name: tensor for name, tensor in state.items() if first[id(tensor)] == name}


def build_model(config: CtrConfig, table: Any, data: Any) -> nn.Module:
    """The net over a table; `data` is a reader or a format, whose slots and numbers are counted."""
    format = data.format if isinstance(data, Clicks) else data
    several = getattr(format, "num_ids", 1) > 1
    sparse = SparseEmbedding(table, pooling="sum" if several else "none", padding_key=0 if several else None)
    options: dict[str, Any] = {"num_slots": format.num_slots, "num_dense": format.num_dense}
    if config.model.name not in CLICK_MODELS:
        return load_attr(config.model.name, "model.name")(sparse, **options)
    if config.model.name != "logistic":
        options |= {"hidden": config.model.hidden, "dropout": config.model.dropout}
    return CLICK_MODELS[config.model.name](sparse, **options)


def _saved_table(path: Path, made: Table, config: CtrConfig) -> Table:
    """The table of a checkpoint, which has to be as `made`, what `config` asks for, but for its learning rate."""
    saved = Table.load(path, **table_options(config.table))
    asked, found = ({"rule": table.rule, **table.birth()} for table in (made, saved))
    if differ := [name for name in asked if asked[name] != found[name]]:
        raise ValueError(
            f"{path} is of a table with "
            + ", ".join(f"{name} {found[name]!r}, got {asked[name]!r}" for name in differ)
            + "; give the settings of the run, another out, or --no-resume"
        )
    saved.lr = made.lr
    return saved


def _next_multiple(step: int, every: int) -> int:
    return (step // every + 1) * every


def _saved(out: Path) -> list[Path]:
    return sorted((out / "checkpoints").glob("step-*"))


def _newest(out: Path) -> Path | None:
    saved = _saved(out)
    return saved[-1] if saved else None
