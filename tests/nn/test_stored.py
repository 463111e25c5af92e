"""A head whose classes lie in a store against the sampled head in memory: same rows, same classes, same steps."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import plsc
import plsc.nn as nn
from plsc import ps
from plsc.comm import Communicator, run_ranks
from plsc.nn.stored import StoredHead
from plsc.ops import SGD, AdamW, RowOptimizer
from plsc.train.export import gather_centres

DIM, CLASSES, BATCH, STEPS, RATE = 8, 2500, 12, 6, 0.1  # three blocks of sampling, the last one short
LR, MOMENTUM, DECAY = 0.3, 0.9, 0.01
MARGINS: dict[str, Callable[[], nn.Margin]] = {
    "norm": lambda: nn.NormFace(scale=16.0),
    "arc": nn.ArcFace,
    "cos": lambda: nn.CosFace(margin=0.4),
    "sphere": nn.SphereFace,
    "combined": lambda: nn.CombinedMargin(m1=1.1, m2=0.3, m3=0.1),
    "ada": nn.AdaFace,
    "curricular": nn.CurricularFace,
    "mag": nn.MagFace,
}
# The same step, as the store has it and as the head in memory has it.
RULES: dict[str, tuple[ps.Rule, Callable[[], RowOptimizer]]] = {
    "sgd": (ps.SGD(weight_decay=DECAY), lambda: SGD(LR, DECAY)),
    "momentum": (ps.Momentum(momentum=MOMENTUM, weight_decay=DECAY), lambda: SGD(LR, DECAY, momentum=MOMENTUM)),
    "adamw": (ps.AdamW(weight_decay=DECAY), lambda: AdamW(LR, DECAY)),
}


def make_table(rule: str = "momentum", *, dim: int = DIM, **options: object) -> ps.Table:
    return ps.Table(dim, **{"rule": RULES[rule][0], "lr": LR, "init": "normal", "seed": 3, **options})


def make_head(store: ps.Store, comm: Communicator | None = None, **options: object) -> StoredHead:
    made = plsc.ClassParallelHead(DIM, CLASSES, weight=store, comm=comm, **{"sample_rate": RATE, "seed": 5, **options})
    assert isinstance(made, StoredHead)
    return made


def twin_of(head: StoredHead, rule: str = "momentum", **options: object) -> nn.ClassParallelHead:
    """The head in memory that starts with the rows as the store bears them."""
    options = {"sample_rate": RATE, "seed": 5, "head_optimizer": RULES[rule][1](), **options}
    twin = nn.ClassParallelHead(DIM, CLASSES, comm=head.comm, **options)
    twin.weight.data.copy_(head.rows(0, head.shard.size))
    return twin


def batch(step: int, comm: Communicator | None = None) -> tuple[Tensor, Tensor]:
    """This rank's part of one global batch, whatever the number of ranks."""
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(BATCH, DIM, generator=g), torch.randint(0, CLASSES, (BATCH,), generator=g)
    y[0], y[1], y[2], y[5] = 0, CLASSES - 1, -1, y[4]
    rank, world = (0, 1) if comm is None else (comm.rank, comm.world_size)
    part = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    return x[part], y[part]


def train(head: nn.ClassParallelHead, steps: range = range(STEPS), dtype: torch.dtype = torch.float32) -> Tensor:
    """Losses and gradients of the embeddings, one row a step."""
    told = []
    for step in steps:
        x, y = batch(step, head.comm)
        x = x.to(dtype).requires_grad_()
        loss = head(x, y)
        loss.backward()
        told.append(torch.cat([loss.detach()[None], x.grad.float().flatten()]))
    return torch.stack(told)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("arena", [False, True], ids=["memory", "file"])
def test_equals_the_head_in_memory(rule: str, arena: bool, tmp_path: Path) -> None:
    head = make_head(make_table(rule, arena=tmp_path if arena else None))
    twin = twin_of(head, rule)
    before = twin.weight.detach().clone()
    close(train(head), train(twin))
    close(head.rows(0, CLASSES), twin.weight.detach())
    moved = (twin.weight.detach() != before).any(1)
    assert 0 < int(moved.sum()) < CLASSES and len(head.store) == int(moved.sum())  # no other row was made
    assert [name for name, _ in head.named_parameters()] == []


@pytest.mark.parametrize("centers", [1, 2])
def test_filled_rows_are_those_of_the_head_in_memory(centers: int) -> None:
    """The same seed, nothing copied."""
    head = make_head(make_table(dim=DIM * centers), sub_centers=centers)
    head.fill()
    twin = nn.ClassParallelHead(
        DIM, CLASSES, sample_rate=RATE, seed=5, sub_centers=centers, head_optimizer=RULES["momentum"][1]()
    )
    assert torch.equal(head.rows(0, CLASSES), twin.weight.detach())
    close(train(head), train(twin))
    close(head.rows(0, CLASSES), twin.weight.detach())


@pytest.mark.parametrize("name", MARGINS)
@pytest.mark.parametrize("options", [{}, {"sub_centers": 3}, {"filter_threshold": 0.3}], ids=str)
def test_every_margin(name: str, options: dict[str, object]) -> None:
    head = make_head(make_table(dim=DIM * int(options.get("sub_centers", 1))), margin=MARGINS[name](), **options)
    twin = twin_of(head, margin=MARGINS[name](), **options)
    close(train(head), train(twin))
    close(head.rows(0, CLASSES), twin.weight.detach())


def in_world(comm: Communicator, shared: ps.Store | None) -> tuple[Tensor, Tensor, Tensor]:
    head = make_head(make_table() if shared is None else shared, comm)
    told = train(head)
    x, y = batch(99, comm)
    with torch.no_grad():
        exact = head.eval()(x, y)
    cosines, _ = head.topk(x, 5)
    rows = torch.cat([part for part in comm.gather_objects(head.rows(0, head.shard.size))])
    return rows, told[:, 0], torch.cat([exact[None], cosines.flatten()])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("place", ["a table a rank", "one table", "seats", "servers"])
def test_ranks(world: int, place: str) -> None:
    alone = run_ranks(1, in_world, None)[0]
    shared = None if place == "a table a rank" else make_table(locked=True)
    if place == "seats":
        shared = ps.Seat(ps.Host(shared))
    servers = []
    if place == "servers":
        servers = [ps.Server({"faces": make_table(locked=True)}, index=i, count=2) for i in range(2)]
        shared = ps.connect(",".join(server.address for server in servers), table="faces")
    try:
        worlds = run_ranks(world, in_world, shared)
    finally:
        if servers:
            shared.close()
        for server in servers:
            server.close()
    for rows, _, _ in worlds:
        close(rows, alone[0])
    close(torch.stack([losses for _, losses, _ in worlds]).mean(0), alone[1])
    close(torch.cat([told[2][1:] for told in worlds]), alone[2][1:])


def test_evaluation_reads_all_classes_and_makes_none() -> None:
    head = make_head(make_table(), margin=nn.CurricularFace(), block=300)
    twin = twin_of(head, margin=nn.CurricularFace(), block=300)
    train(head), train(twin)
    held = len(head.store)
    x, y = batch(50)
    for module in (head, twin):
        module.eval()
    with torch.no_grad():
        close(head(x, y), twin(x, y))
        close(head.losses(x, y), twin.losses(x, y))
        close(head.train()(x, y), twin.train()(x, y))  # without a gradient all classes count here, too
        (cosines, classes), (expected, expected_classes) = head.topk(x, 7), twin.topk(x, 7)
    close(cosines, expected)
    assert torch.equal(classes, expected_classes)
    assert torch.equal(head.rows(2490, 9999), head.rows(2490, CLASSES)) and head.rows(7, 7).shape == (0, DIM)
    exported = np.concatenate(list(gather_centres(head, block=999)))
    np.testing.assert_array_equal(exported, head.rows(0, CLASSES).numpy())
    assert len(head.store) == held
    with pytest.raises(RuntimeError, match="gives no gradient"):
        head.eval()(x.requires_grad_(), y)


def test_losses_with_weights_of_their_own() -> None:
    head = make_head(make_table())
    twin = twin_of(head)
    x, y = batch(0)
    for each in (head, twin):
        (each.losses(x, y) * torch.linspace(0, 2, BATCH)).sum().backward()
    close(head.rows(0, CLASSES), twin.weight.detach())


def test_gradients_that_are_not_finite_leave_their_rows(caplog: pytest.LogCaptureFixture) -> None:
    head = make_head(make_table())
    before = head.rows(0, CLASSES)
    x, y = batch(0)
    (head(x, y) * torch.inf).backward()
    assert torch.equal(head.rows(0, CLASSES), before) and "held a NaN or an infinity" in caplog.text


def test_a_loss_without_backward_changes_no_row() -> None:
    head = make_head(make_table())
    before = head.rows(0, CLASSES)
    head(*batch(0))
    assert torch.equal(head.rows(0, CLASSES), before)


@pytest.mark.parametrize("amp", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("strategy", [{}, {"accumulate": 3, "clip_norm": 0.5}], ids=str)
def test_in_a_fleet(amp: str, strategy: dict[str, object]) -> None:
    """Overflow, clipping and accumulation decide about the rows as they do about the head in memory."""
    found = []
    for stored in (True, False):
        fleet = plsc.Fleet(plsc.Strategy(amp=amp, **strategy))
        torch.manual_seed(0)
        backbone = fleet.replicate(torch.nn.Linear(DIM, DIM))
        head = make_head(make_table(), fleet.comm)
        chosen = head if stored else twin_of(head)
        optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1)
        taken = []
        for step in range(STEPS):
            x, y = batch(step)
            if fleet.scaler is not None:  # too large for half precision until the first step was skipped
                fleet.scaler.loss_scale = 1024.0 if any(each.overflow for each in taken) else 2.0**120
            with fleet.autocast():
                embeddings = backbone(x)
            taken.append(fleet.step(chosen(embeddings, y), optimizer))
        assert any(each.updated for each in taken)
        assert any(each.overflow for each in taken) == (amp == "fp16")
        found.append((chosen.rows(0, CLASSES), backbone.weight.detach()))
    close(found[0][0], found[1][0])
    close(found[0][1], found[1][1])


def test_learning_rate_is_the_stores() -> None:
    store = make_table()
    head = make_head(store)
    assert head.head_optimizer is not None and head.head_optimizer.initial_lr == LR
    head.head_optimizer.lr = 0.05
    assert store.lr == 0.05 == head.head_optimizer.lr


@pytest.mark.parametrize("mode", [ps.Direct, ps.Async])
def test_modes_around_a_store(mode: Callable[[ps.Store], ps.Store]) -> None:
    plain = make_head(make_table())
    with mode(make_table()) as store:  # type: ignore[attr-defined]
        head = make_head(store)
        told = []
        for step in range(STEPS):
            told.append(train(head, range(step, step + 1)))
            store.flush()
        close(torch.cat(told), train(plain))
        close(head.rows(0, CLASSES), plain.rows(0, CLASSES))


def save_in_world(comm: Communicator, folder: Path) -> tuple[Tensor, Tensor]:
    head = make_head(make_table("adamw"), comm)
    train(head)
    head.save_classes(folder / "classes")
    plsc.save(folder / "run", comm=comm, head=head)
    after = train(head, range(STEPS, 2 * STEPS))
    return after, torch.cat(comm.gather_objects(head.rows(0, head.shard.size)))


def load_in_world(comm: Communicator, folder: Path) -> tuple[Tensor, Tensor, list[str]]:
    head = make_head(make_table("adamw"), comm)
    head.load_classes(folder / "classes")
    plsc.load(folder / "run", comm=comm, head=head)
    assert head.shard.size >= len(head.store) > 0
    after = train(head, range(STEPS, 2 * STEPS))
    return after, torch.cat(comm.gather_objects(head.rows(0, head.shard.size)))


@pytest.mark.parametrize("worlds", [(1, 1), (2, 2), (3, 2), (1, 3), (2, 1)], ids=str)
def test_saved_and_loaded_by_any_number_of_ranks(
    worlds: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The steps after a load are those after the save: rows, optimizer state and sampling are all there."""
    saved = run_ranks(worlds[0], save_in_world, tmp_path)
    loaded = run_ranks(worlds[1], load_in_world, tmp_path)
    tolerance = 1e-7 if worlds[0] == worlds[1] else 1e-4  # AdamW's first steps look at signs
    for (_, rows), (_, expected) in zip(loaded, [saved[0]] * len(loaded), strict=True):
        close(rows, expected, tolerance)
    losses = [torch.stack([told[:, 0] for told, _ in world]).mean(0) for world in (saved, loaded)]
    close(losses[0], losses[1], tolerance)
    assert "beside save" not in caplog.text


def test_a_checkpoint_beside_another_save_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    head = make_head(make_table())
    train(head)
    head.save_classes(tmp_path / "old")
    train(head)
    head.save_classes(tmp_path / "new")
    plsc.save(tmp_path / "run", head=head)
    again = make_head(make_table())
    again.load_classes(tmp_path / "old")
    plsc.load(tmp_path / "run", head=again)
    assert "made beside save 'step 12'" in caplog.text and "this one is at 'step 6'" in caplog.text
    assert int(again.num_steps) == 2 * STEPS


def file_of(folder: Path, start: int, stop: int) -> Path:
    return folder / f"classes-{start:012d}-{stop:012d}-of-{CLASSES:012d}.table"


@pytest.mark.parametrize("worlds", [(1, 2), (2, 2), (2, 3)], ids=str)
def test_more_classes_than_were_saved(worlds: tuple[int, int], tmp_path: Path) -> None:
    """Shards are cut elsewhere then; every old class is with the rank that has it now, the new ones are unborn."""
    rows = torch.cat(run_ranks(worlds[0], saved_rows, tmp_path))
    grown = torch.cat(run_ranks(worlds[1], loaded_rows, tmp_path, CLASSES + 901))
    assert torch.equal(grown[:CLASSES], rows)
    fresh = make_table("adamw").pull(torch.arange(CLASSES, CLASSES + 901), create=False)
    assert torch.equal(grown[CLASSES:], fresh)
    with pytest.raises(
        ValueError, match=f"holds {CLASSES} classes, this head {CLASSES - 1}; classes are never dropped"
    ):
        run_ranks(1, loaded_rows, tmp_path, CLASSES - 1)


def saved_rows(comm: Communicator, folder: Path) -> Tensor:
    head = make_head(make_table("adamw"), comm)
    train(head)
    head.save_classes(folder)
    return head.rows(0, head.shard.size)


def loaded_rows(comm: Communicator, folder: Path, classes: int) -> Tensor:
    store = make_table("adamw")
    head = plsc.ClassParallelHead(DIM, classes, weight=store, comm=comm, sample_rate=RATE)
    assert isinstance(head, StoredHead)
    head.load_classes(folder)
    assert all(((keys >= head.shard.start) & (keys < head.shard.stop)).all() for keys, _ in store.items())
    return head.rows(0, head.shard.size)


def test_bad_saves(tmp_path: Path) -> None:
    head = make_head(make_table())
    with pytest.raises(ValueError, match="no file of save_classes"):
        head.load_classes(tmp_path)
    for world in (2, 3):
        run_ranks(world, lambda comm: make_head(make_table(), comm).save_classes(tmp_path))
    with pytest.raises(ValueError, match="one file of each rank of one world"):
        head.load_classes(tmp_path)
    third = -(-CLASSES // 3)
    for start in (0, third, 2 * third):
        file_of(tmp_path, start, min(start + third, CLASSES)).unlink()
    train(head)
    old = head.save_classes(tmp_path / "alone")
    with pytest.raises(ValueError, match="expected a new one"):
        head.load_classes(tmp_path / "alone")
    old.replace(file_of(tmp_path, CLASSES // 2, CLASSES))  # of another step than the first file
    with pytest.raises(ValueError, match=r"different steps \(step 0, step 6\)"):
        make_head(make_table()).load_classes(tmp_path)
    with pytest.raises(ValueError, match="differ in seed"):
        make_head(make_table(seed=4)).load_classes(tmp_path)
    with pytest.raises(ValueError, match="servers save by"):
        make_head(ps.Seat(ps.Host(make_table()))).save_classes(tmp_path / "c")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"head_optimizer": SGD(0.1)}, "rule=plsc.ps.Momentum"),
        ({"weight_dtype": "bf16"}, "expected fp32: the store decides"),
        ({"sample_rate": 1.0}, "expected less than 1"),
        ({"weight": "classes"}, "got str without dim, lr"),
        ({"weight": {"dim": 9}}, "store of dim 9, expected 8"),
        ({"sub_centers": 2}, "make the table with dim=16"),
        ({"weight": {"init": "zeros"}}, "born alike"),
        ({"weight": {"max_rows": 4096}}, "would forget classes"),
        ({"weight": {"admit_after": 2}}, "would forget classes"),
    ],
    ids=str,
)
def test_what_is_refused(options: dict[str, object], told: str) -> None:
    weight = options.get("weight", {})
    store = make_table(**weight) if isinstance(weight, dict) else weight
    with pytest.raises(ValueError, match=told):
        plsc.ClassParallelHead(DIM, CLASSES, **{"sample_rate": RATE, **options, "weight": store})


def test_modes_that_divide_are_refused() -> None:
    def make(comm: Communicator) -> None:
        seat = ps.Seat(ps.Host(make_table()))
        for store in (ps.Sync(seat, workers=2), ps.Geo(seat)):
            with pytest.raises(ValueError, match="divides what is pushed by the number of workers"):
                make_head(store, comm)

    run_ranks(2, make)


def test_bad_use() -> None:
    head = make_head(make_table())
    for wrong in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="over a store cannot be"):
            wrong(head)
    x, y = batch(0)
    with pytest.raises(ValueError, match=r"expected \[batch, 8\]"):
        head(x[:, 1:], y)
    with pytest.raises(ValueError, match="out of range"):
        head(x, y + CLASSES)
    with pytest.raises(ValueError, match="= num_classes"):
        head.topk(x, 0)

    class Mine(nn.ClassParallelHead):
        pass

    with pytest.raises(ValueError, match=r"Mine keeps its classes in memory(.|\n)*StoredHead"):
        Mine(DIM, CLASSES, sample_rate=RATE, weight=make_table())
    grown = make_head(make_table())
    state = grown.state_dict()
    small = plsc.ClassParallelHead(DIM, CLASSES - 1, weight=make_table(), sample_rate=RATE)
    with pytest.raises(ValueError, match="classes are never dropped"):
        small.load_state_dict(state)
