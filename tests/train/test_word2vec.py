"""Word vectors end to end: a text of known structure, going on after a stop, workers, measures, and the command."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plsc import cli, cli_ps
from plsc.comm import Communicator
from plsc.comm.local import run_ranks
from plsc.data.text import Vocabulary
from plsc.data.vectors import WordVectors
from plsc.ps import Async, Geo, Host, Seat, Sync
from plsc.train import word2vec
from plsc.train.config import from_dict, list_recipes
from plsc.train.word2vec_config import TABLES, SkipGramModel, TextData, Word2VecConfig, make_table
from plsc.train.word_metrics import analogies, similarity, spearman


def config(out: Path, **options: object) -> Word2VecConfig:
    base = Word2VecConfig(
        out=str(out),
        epochs=3,
        batch_words=2000,
        log_every=5,
        data=TextData(num_sentences=6000),
        model=SkipGramModel(dim=32, lr=0.05),
    )
    return replace(base, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A run of one thread."""
    out = tmp_path_factory.mktemp("words") / "run"
    return out, word2vec.train(config(out))


def test_finds_what_the_text_is_made_of(whole: tuple[Path, dict[str, float]]) -> None:
    out, result = whole
    assert result["similarity_spearman"] > 0.6 and result["analogies_accuracy"] > 0.9
    assert result["similarity_unknown"] == result["analogies_unknown"] == 0
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["loss"] < 0.8 * records[0]["loss"] and records[-1]["lr"] < 0.1 * records[0]["lr"]
    vectors, text = WordVectors.load(out / "vectors.bin"), WordVectors.load(out / "vectors.txt")
    np.testing.assert_array_equal(vectors.vectors, text.vectors)
    assert vectors.words == text.words == Vocabulary.load(out / "vocab.txt").words
    assert json.loads((out / "result.json").read_text())["words"] == len(vectors)
    assert (out / "loss.png").is_file()


def test_goes_on_after_an_epoch_as_if_it_had_not_stopped(tmp_path: Path, whole: tuple[Path, dict[str, float]]) -> None:
    class Stop(Exception):
        pass

    class Stopping(word2vec.WordTrainer):
        def _save(self) -> None:
            super()._save()
            raise Stop

    for _ in range(2):
        with pytest.raises(Stop):
            Stopping(config(tmp_path)).fit()
    assert word2vec.WordTrainer(config(tmp_path)).epoch == 2
    assert word2vec.train(config(tmp_path)) == whole[1]
    with pytest.raises(ValueError, match="give another out"):
        word2vec.WordTrainer(config(tmp_path, model=SkipGramModel(dim=16)))
    assert word2vec.WordTrainer(config(tmp_path, model=SkipGramModel(dim=16), resume=False)).epoch == 0


def test_threads_and_shared_negatives(tmp_path: Path) -> None:
    run = config(tmp_path, threads=3, model=SkipGramModel(dim=32, lr=0.05, shared=True))
    result = word2vec.evaluate(run, word2vec.WordTrainer(run).fit())
    assert result["similarity_spearman"] > 0.6 and result["analogies_accuracy"] > 0.9


@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_modes_without_servers_learn_alike(mode: str, tmp_path: Path, whole: tuple[Path, dict[str, float]]) -> None:
    trainer = word2vec.WordTrainer(config(tmp_path, ps=mode, ps_args={"every": 4} if mode == "geo" else {}))
    mine, here = trainer.fit(), WordVectors.load(whole[0] / "vectors.bin")
    for store in trainer.stores:
        store.close()
    np.testing.assert_allclose(mine.vectors, here.vectors, rtol=0, atol=2e-3)


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow), "geo", "geo in rounds"])
def test_workers_share_one_store(mode: str, tmp_path: Path) -> None:
    """Three workers as threads; each trains a third, and all of it comes together."""
    run = config(tmp_path, epochs=4, model=SkipGramModel(dim=32, lr=0.3 if mode == "sync" else 0.05))
    hosts = [Host(make_table(run, name, locked=True)) for name in TABLES]
    make = {
        "async": lambda seat: Async(seat, merge=2, staleness=1),  # unbounded, a starved sender learns little here
        "sync": lambda seat: Sync(seat, workers=3),
        "geo": lambda seat: Geo(seat, every=2, weight=1.0, workers=3),
        "geo in rounds": lambda seat: Geo(seat, every=2, pace=0.001, workers=3, rounds=True),
    }[mode]

    def work(comm: Communicator) -> tuple[int, WordVectors]:
        first, second = (make(Seat(host, rank=comm.rank)) for host in hosts)
        trainer = word2vec.WordTrainer(run, comm=comm, stores=(first, second))
        vectors = trainer.fit()
        first.close()
        second.close()
        return trainer.step, vectors

    found = run_ranks(3, work)
    steps = [step for step, _ in found]
    assert max(steps) - min(steps) <= (0 if mode in ("sync", "geo in rounds") else run.epochs)
    np.testing.assert_array_equal(found[0][1].vectors, found[2][1].vectors)
    result = word2vec.evaluate(run, found[0][1])
    assert result["similarity_spearman"] > 0.5 and result["analogies_accuracy"] > 0.1


def test_rates_follow_the_place_in_the_text(tmp_path: Path) -> None:
    trainer = word2vec.WordTrainer(config(tmp_path))
    assert trainer.lr_of(0) == 0.05
    trainer.epoch = 1
    third = 0.05 - (0.05 - 1e-4) / 3
    assert trainer.lr_of(0) == pytest.approx(third)
    trainer.epoch = 3
    assert trainer.lr_of(0) == pytest.approx(1e-4)


def test_spearman() -> None:
    assert spearman(np.array([1.0, 2, 3, 4]), np.array([10.0, 20, 30, 40])) == pytest.approx(1.0)
    assert spearman(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == pytest.approx(-1.0)
    # Without ties 1 - 6 sum d^2 / (n (n^2 - 1)); d = 0, 1, 1, 2, 2 here.
    assert spearman(np.array([1.0, 2, 3, 4, 5]), np.array([1.0, 3, 2, 6, 4.5])[[0, 1, 2, 4, 3]]) == pytest.approx(0.9)
    # Ranks 1.5, 1.5, 3 against 1, 2, 3: covariance 1.5, variances 1.5 and 2.
    assert spearman(np.array([5.0, 5, 9]), np.array([1.0, 2, 3])) == pytest.approx(1.5 / (1.5 * 2) ** 0.5)
    assert np.isnan(spearman(np.ones(3), np.arange(3.0)))


def vectors() -> WordVectors:
    words = ["man", "woman", "king", "queen", "apple", "walk", "walked"]
    rows = [[1, 0, 0], [1, 1, 0], [3, 0, 1], [3, 1.2, 1], [-1, 0, 2], [0, -3, 0.1], [0, -2, 1]]
    return WordVectors(words, np.array(rows, np.float32))


def test_measures_on_vectors_made_by_hand(tmp_path: Path) -> None:
    pairs, questions = tmp_path / "pairs.csv", tmp_path / "questions.txt"
    pairs.write_text("# human scores\nWord 1,Word 2,mean\nMan,woman,8.5\nking,queen,9\nman,apple,1\nman,unseen,5\n")
    found = similarity(vectors(), pairs)
    assert found == {"spearman": pytest.approx(1.0), "unknown": 0.25}
    questions.write_text(
        ": family\nman woman king queen\nMan Woman King Queen\nman woman king nobody\n"
        ": gram1-past\nman woman king apple\n"
    )
    found = analogies(vectors(), questions)
    assert found == {"accuracy": pytest.approx(2 / 3), "semantic": 1.0, "syntactic": 0.0, "unknown": 0.25}
    with pytest.raises(ValueError, match="none of 4 questions"):
        analogies(vectors(), questions, most_frequent=2)
    for file, text, word, measure in [
        ("a", "x y z w v\n", "four words", analogies),
        ("b", "man woman 3\nman king\n", "line 2", similarity),
        ("c", "man woman 3\n", "1 of 1 pairs", similarity),
    ]:
        (tmp_path / file).write_text(text)
        with pytest.raises(ValueError, match=word):
            measure(vectors(), tmp_path / file)


def test_reads_the_files_people_have(shared: Path) -> None:
    files = shared / "data" / "text" / "wordsim353.tsv", shared / "data" / "text" / "questions-words.txt"
    if not all(file.is_file() for file in files):
        pytest.skip("needs the similarity and analogy files of the real data folder")
    words = ["tiger", "cat", "love", "sex", "athens", "greece", "baghdad", "iraq", "king", "computer", "keyboard"]
    some = WordVectors(words, np.random.default_rng(0).standard_normal((len(words), 8)))
    assert 0.9 < similarity(some, files[0])["unknown"] < 1 and 0.9 < analogies(some, files[1])["unknown"] < 1


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"task": "ctr"}, "expected 'word2vec'"),
        ({"epochs": 0}, "epochs is 0"),
        ({"model": {"dim": 0}}, "model.dim is 0"),
        ({"model": {"lr": 0.0}}, "lr > 0"),
        ({"model": {"sample": -1.0}}, "at least 0"),
        ({"data": {"tokens": "letter"}}, "did you mean 'letters'"),
        ({"data": {"sentence": "page"}}, "data.sentence"),
        ({"formats": ["bin"]}, "did you mean 'binary'"),
        ({"ps": "gio"}, "expected none or one of"),
        ({"ps": "geo", "ps_args": {"evry": 3}}, "knows no evry"),
        ({"servers": ["127.0.0.1:1"]}, "no mode"),
        ({"ps": "sync", "threads": 2}, "use threads 1"),
        ({"modell": {}}, "unknown key 'modell'"),
    ],
)
def test_bad_recipes(values: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        from_dict(Word2VecConfig, values, where="recipe")


def test_workers_need_servers(tmp_path: Path) -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="got 2 workers"):
            word2vec.WordTrainer(config(tmp_path), comm=comm)

    run_ranks(2, work)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "word2vec" in list_recipes(cli_ps.PS_TASKS) and "word2vec" not in list_recipes()
    Path("corpus.txt").write_text("the cat sat on the mat\nthe dog sat on the cat\n" * 30)
    flags = ["--epochs", "1", "--batch-words", "40", "--log-every", "1", "--model.dim", "8"]
    assert cli.ps(["train", "word2vec", "corpus.txt", *flags]) == 0
    out = capsys.readouterr().out
    assert "runs/word2vec/vectors.bin" in out and "training: " in out and "6 words" in out
    assert len(WordVectors.load("runs/word2vec/vectors.txt")) == 6
    assert cli.ps(["train", "word2vec", "no-such.txt", "--out", "x"]) == cli.EXIT_USAGE
    assert "no-such.txt" in capsys.readouterr().err
    assert cli.ps([]) == cli.EXIT_USAGE and "plsc-ps train word2vec [corpus.txt]" in capsys.readouterr().out


@pytest.mark.slow
def test_processes_with_servers(tmp_path: Path) -> None:
    """Two servers and two workers, started by the launcher; rank 0 writes what all have trained."""
    tables = "".join(f'[tables.{name}]\ndim = 16\nrule = "sgd"\nlr = 1.0\ninit_scale = 0.06\n' for name in TABLES)
    (tmp_path / "tables.toml").write_text(tables)
    words = ["train", "word2vec", "--ps", "geo", "--ps-args", "every", "2", "--data.num-sentences", "6000"]
    words += ["--threads", "1", "--batch-words", "2000", "--model.dim", "16", "--model.lr", "0.05", "--out", "run"]
    start = f"import sys; sys.path[:] = {sys.path!r}; from plsc.cli import ps; sys.exit(ps())"
    python = [sys.executable, "-P", "-c", start]
    launch = ["launch", "--servers", "2", "--workers", "2", "--restarts", "0", "--tables", "tables.toml", "--"]
    command = [*python, *launch, *python, *words]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["similarity_spearman"] > 0.4
    assert len(WordVectors.load(tmp_path / "run" / "vectors.bin")) == result["words"]
