"""The training loop: every step, log line, evaluation and checkpoint of a run, in the order they happen."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsc.comm import Communicator, together
from plsc.data import Dataset, Loader, Pairs
from plsc.fleet import Fleet, NonFiniteLoss
from plsc.models.checks import check_embeddings
from plsc.nn.stored import StoredHead
from plsc.strategies import first_nonfinite, set_lr
from plsc.train import build
from plsc.train.checkpoint import Checkpoints, load
from plsc.train.class_store import ClassStore
from plsc.train.config import Config, dump, load_recipe, to_dict
from plsc.train.evaluate import VerificationResult, classify, embed, identify, verify
from plsc.train.meter import AFTER_NAN, Meter
from plsc.train.metrics_log import MetricsLog
from plsc.train.resume import (
    class_names,
    compare_settings,
    digest,
    match_classes,
    match_trained,
    read_classes,
    write_classes,
)
from plsc.train.storage import make_directories, replace_durably

logger = logging.getLogger(__name__)

AMP_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """A run from its config: build, resume if there is something to resume, `fit`, `evaluate`."""

    def __init__(
        self, config: Config, *, comm: Communicator | None = None, progress: build.Progress | None = None
    ) -> None:
        self.config = config
        self.fleet = Fleet(config.strategy, comm)
        comm = self.fleet.comm
        self.out = Path(config.out)
        self.checkpoints = Checkpoints(self.out / "checkpoints", keep=config.keep, comm=comm)
        self._saved = self.checkpoints.newest_extra()  # what the run to go on says of itself
        if comm.rank == 0:  # glyphs are drawn once, by one rank
            build.build_data(config.data, seed=config.seed, progress=progress)
        comm.barrier()
        self.data = self._known_classes(build.build_data(config.data, seed=config.seed))
        self.num_classes = build.num_classes(config, self.data)
        self.eval_data: Dataset | None = None
        self.pairs: Pairs | None = None
        if config.eval.task != "none":
            self.eval_data, self.pairs = build.build_eval(config, self.data)
            if config.eval.task == "classification":
                where = f"eval.path {config.eval.path}"
                self.eval_data = match_trained(self.eval_data, self.data, where=where)
        self.more = build.build_sets(config)
        if self.pairs is not None and self.eval_data is self.data and comm.rank == 0:
            logger.warning("verification uses the TRAINING images: no eval.path is given; the figure says nothing new")
        self.loader = self.fleet.loader(
            self.data,
            config.batch_size,
            seed=config.seed,
            transform=build.build_transform(config.data),
            workers=config.data.workers,
            on_bad_image=config.data.on_bad_image,
            per_class=config.data.per_class,
        )
        if comm.rank > 0:  # rank 0 draws the weights that all get; ranks as threads share torch's generator with it
            comm.barrier()
        torch.manual_seed(config.seed)
        backbone = build.build_backbone(config)
        if comm.rank == 0:
            comm.barrier()
        self.backbone = self.fleet.replicate(backbone)
        self.head = build.build_head(config, self.num_classes, comm).to(self.fleet.device)
        self.classes: ClassStore | None = None
        if isinstance(self.head, StoredHead):
            self.classes = ClassStore(self.head, config, self.checkpoints)
        self.optimizer = build.build_optim(config, self.backbone, self.head)
        self.step = 0
        self._plan()
        self.log = MetricsLog(self.out) if comm.rank == 0 else None
        self.verified: dict[str, VerificationResult] = {}  # of the last evaluation, by set
        self._embedded: tuple[int, np.ndarray] | None = None  # the step of, and embeddings [N, D]
        self._signal: int | None = None
        self._last_saved = -1

    def _known_classes(self, data: Dataset) -> Dataset:
        """The data with the class numbers of the checkpoint to go on from: those of its classes, by name."""
        config = self.config
        matched = [data]

        def match() -> None:
            known = read_classes(self.out, self._saved or {})
            where = config.data.path or config.data.kind
            matched.append(match_classes(data, known, extend=config.head.extend_classes, where=where))

        together(self.fleet.comm, "match the classes with the checkpoint's", match)
        return matched[-1]

    def _plan(self) -> None:
        """Steps in all and the learning rates on the way, counted from where step and loader stand.

        So a run that goes on with other data or other batches still ends, and its schedule with it, after its epochs.
        """
        config, loader, accumulate = self.config, self.loader, self.config.strategy.accumulate

        def step_at(epoch: float) -> float:
            return self.step + (epoch * loader.steps_per_epoch - loader.num_passed) / accumulate

        self.total_steps = max(math.floor(step_at(config.epochs)), self.step)
        if config.max_steps:
            self.total_steps = min(self.total_steps, config.max_steps)
        self.schedule = build.build_schedule(config, max(self.total_steps, 1), step_at)

    # ---- the run

    def fit(self) -> bool:
        """Trains to the end; False if a signal stopped it after a checkpoint was written."""
        self._begin()
        with self._signals():
            return self._loop()

    def _loop(self) -> bool:
        config, fleet, micro = self.config, self.fleet, 0
        meter = Meter(self)
        for images, labels in self.loader.epochs(config.epochs):
            if self.step >= self.total_steps:
                break
            if micro == 0:
                self._prepare_step()
            try:
                with fleet.autocast():
                    loss = self.head(self._embedded_batch(images), labels)
                taken = fleet.step(loss, self.optimizer)
            except NonFiniteLoss as error:
                raise self._explain(error, images, labels) from error
            micro = (micro + 1) % config.strategy.accumulate
            meter.add(loss, len(images))
            if micro:
                continue
            self.step += 1
            last = self.step == self.total_steps
            if self.step % config.log_every == 0 or last:
                meter.report(taken.grad_norm)
            ended = self.loader.position + self.loader.batch_size > len(self.data)  # no whole batch is left
            every = config.eval.every
            if ended and every and not last and (self.loader.epoch + 1) % every == 0:
                fleet.meet(self.optimizer)
                self.evaluate()
                meter.restart()
            # On a GPU the ranks ask each other at log lines only: every question stops the host.
            asked = fleet.device.type == "cpu" or last or self.step % config.log_every == 0
            stop = asked and fleet.any(self._signal is not None)
            if last or stop or (self.step % config.save_every == 0 if config.save_every else ended):
                self.save()
                meter.restart()
            if stop:
                logger.info("stopped by signal at step %d; run the same command again to continue", self.step)
                return False
        if self._last_saved != self.step:
            self.save()
        return True

    def _embedded_batch(self, images: Tensor) -> Tensor:
        model = self.config.model
        found = self.backbone(images)
        return check_embeddings(found, images, model=model.backbone, embedding_size=model.embedding_size)

    def _prepare_step(self) -> None:
        """Learning rate and random numbers of a step depend on its number alone, so that resume continues exactly."""
        factor = self.schedule.factor(self.step)
        set_lr(self.optimizer, factor)
        row_optimizer = self.head.head_optimizer
        if self.classes is not None:
            self.classes.set_lr(self.config.optim.lr * factor)
        elif row_optimizer is not None:
            row_optimizer.lr = row_optimizer.initial_lr * factor
        seeds = np.random.SeedSequence([self.config.seed, self.step, self.fleet.rank])
        torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0]) & (2**63 - 1))

    def _explain(self, error: NonFiniteLoss, images: Tensor, labels: Tensor) -> NonFiniteLoss:
        """Runs the forward pass again to find where the first value that is not finite came from."""

        def forward() -> None:
            with torch.no_grad(), self.fleet.autocast():
                self.head(self.backbone(images), labels)

        name = first_nonfinite({"backbone": self.backbone, "head": self.head}, forward)
        names = [found for found in self.fleet.comm.gather_objects(name) if found]
        latest = self.checkpoints.latest()
        return NonFiniteLoss(
            f"{error} at step {self.step + 1}; first tensor that is not finite: "
            f"{names[0] if names else error.gradient or 'the loss itself'}; last checkpoint: {latest or 'none'}; "
            f"{AFTER_NAN}"
        )

    def close(self) -> None:
        """Ends the reading processes and closes the metrics files."""
        self.loader.close()
        if self.classes is not None:
            self.classes.close()
        if self.log is not None:
            self.log.close()

    # ---- checkpoints

    def parts(self) -> dict[str, Any]:
        """Everything a resumed run needs, by name."""
        return {
            "backbone": self.backbone,
            "head": self.head,
            "optimizer": self.optimizer,
            "fleet": self.fleet,
            "loader": _OtherData(self.loader) if self.config.head.extend_classes else self.loader,
        }

    def save(self) -> Path:
        self.fleet.meet(self.optimizer)
        if self.classes is not None:
            self.classes.save(self.step)
        path = self.checkpoints.save(self.step, extra=self._about(), **self.parts())
        if self.classes is not None:
            self.classes.tidy()
        self._last_saved = self.step
        return path

    def _about(self) -> dict[str, Any]:
        names = class_names(self.data)
        classes = None if names is None else {"count": len(names), "digest": digest(names)}
        return {"num_classes": self.num_classes, "config": to_dict(self.config), "classes": classes}

    def resume(self) -> bool:
        """Loads the newest checkpoint of the run's directory; False if there is none. Options are the config's."""
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        if self.classes is not None and (newest := self.checkpoints.newest()) is not None:
            self.classes.load(newest)
        found = self.checkpoints.load(extend_classes=self.config.head.extend_classes, **self.parts())
        if found is None:
            return False
        for group, asked in zip(self.optimizer.param_groups, options, strict=True):
            group.update(asked)  # the learning rate and its like may be changed on resume, state may not
        self.step = self._last_saved = found.step
        self._plan()
        logger.info("resumed at step %d of %d from %s", self.step, self.total_steps, found.path)
        return True

    def _begin(self) -> None:
        comm, config = self.fleet.comm, self.config
        if not config.resume and self.checkpoints.steps():
            raise ValueError(
                f"{self.checkpoints.directory} has checkpoints already and resume is off; expected a fresh folder; "
                "give another --out, delete it, or leave resume on to continue"
            )
        before = (self._saved or {}).get("config")
        changes = [] if before is None else compare_settings(before, config)
        resumed = config.resume and self.resume()
        if resumed and before is not None:  # what it started from stays on record
            started = before["model"].get("weights", "")
            config = self.config = replace(config, model=replace(config.model, weights=started))
        if changes and comm.rank == 0:
            logger.warning(
                "goes on with other settings than it was begun with: %s; it now has %d steps in all",
                "; ".join(changes),
                self.total_steps,
            )
        if not resumed and self.classes is not None:
            self.classes.check_new()
        if not resumed and config.model.weights:
            self._take_weights(config.model.weights)

        def open_files() -> None:
            if self.log is not None:
                make_directories(self.out)
                # After the checkpoint was found to fit: a config that does not must not take the run's place.
                replace_durably(self.out / "config.toml", [dump(config).encode()])
                write_classes(self.out, class_names(self.data))
                self.log.open(self.step if resumed else 0)

        together(comm, f"write into {self.out}", open_files)
        parameters = sum(p.numel() for p in self.backbone.parameters())
        logger.info(
            "%d images, %d classes, %d ranks; %s with %.2f M parameters, head of %d x %d; %d steps of %d images",
            len(self.data),
            self.num_classes,
            comm.world_size,
            config.model.backbone,
            parameters / 1e6,
            self.num_classes,
            config.model.embedding_size,
            self.total_steps,
            config.batch_size,
        )

    def _take_weights(self, source: str) -> None:
        """Starts from the backbone of another run or checkpoint."""
        if not Path(source).is_dir():
            raise ValueError(
                f"model.weights is {source!r}, expected the folder of a run or of a checkpoint; check the path"
            )
        newest = Checkpoints(Path(source) / "checkpoints", comm=self.fleet.comm).latest()
        load(newest or source, comm=self.fleet.comm, backbone=self.backbone)

    # ---- evaluation

    def _share_statistics(self) -> None:
        """Rank 0's buffers (batch-norm statistics) on every rank: the model that is saved is the one measured."""
        for buffer in self.backbone.buffers():
            self.fleet.comm.broadcast(buffer).wait()

    def evaluate(self) -> dict[str, Any]:
        """Measures what the config asks for, logs and returns the figures; collective."""
        start = time.perf_counter()
        if self.eval_data is None:
            return {}
        self._share_statistics()
        result: dict[str, Any]
        if self.pairs is None:
            found = classify(self.backbone, self.head, self.eval_data, **self._eval_options())
            result = {f"top{k}": value for k, value in found.items()}
        else:
            _, embeddings = self.embed()
            self.verified = {"verification": verify(embeddings, self.pairs)}
            result = dict(self.verified["verification"].record())
            labels = np.asarray(self.eval_data.labels)
            known = labels[labels >= 0]  # a .bin set has pairs but no classes
            if len(np.unique(known)) < len(known):
                found = identify(embeddings, labels, ks=(1, 5))
                result |= {f"rank{k}": value for k, value in found.items()}
        for name, (data, pairs) in self.more.items():
            self.verified[name] = verify(embed(self.backbone, data, **self._eval_options()), pairs)
            result |= {f"{name}/{key}": value for key, value in self.verified[name].record().items()}
        result["eval_seconds"] = time.perf_counter() - start
        if self.log is not None:
            self.log.write({"step": self.step, **{f"eval/{name}": value for name, value in result.items()}})
        shown = ", ".join(f"{name} {value:.4g}" for name, value in result.items() if value is not None)
        logger.info("evaluation at step %d: %s", self.step, shown)
        return result

    def embed(self) -> tuple[Dataset, np.ndarray]:
        """The evaluation set (the training set if there is none) and its embeddings [N, D] as of now; collective.

        Computed once between two steps.
        """
        data = self.data if self.eval_data is None else self.eval_data
        if self._embedded is None or self._embedded[0] != self.step:
            self._embedded = (self.step, embed(self.backbone, data, **self._eval_options()))
        return data, self._embedded[1]

    def _eval_options(self) -> dict[str, Any]:
        return {
            "comm": self.fleet.comm,
            "batch_size": self.config.eval.batch_size,
            "device": self.fleet.device,
            "autocast": AMP_DTYPES[self.config.strategy.amp],
            "flip": self.config.eval.flip,
        }

    # ---- signals

    @property
    def stopped_by(self) -> int | None:
        """The signal that asked this rank to stop, if one has."""
        return self._signal

    def _signals(self) -> Any:
        return _CaughtSignals(self)


class _OtherData:
    """The loader as a part of a checkpoint that may have been written with fewer images."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.state_dict = loader.state_dict

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state, other_data=True)


class _CaughtSignals:
    """SIGTERM, SIGHUP and Ctrl-C ask the loop to save and stop after the step, a second Ctrl-C ends it as it stands.

    Only the main thread can catch signals.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                    self._before[number] = signal.signal(number, self._note)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        if os.getpid() != self._process:
            return  # a reading process that was forked: it ends with the loader
        if number == signal.SIGINT and self._trainer._signal == number:
            raise KeyboardInterrupt
        self._trainer._signal = number
        logger.info("%s: stopping after this step", signal.Signals(number).name)


def read_config(run: str | Path) -> Config:
    """The config a run was made with."""
    path = Path(run) / "config.toml"
    if not path.is_file():
        raise ValueError(f"{run} is not a run: it has no config.toml; expected the `out` folder of plsc-train")
    return load_recipe(str(path))
