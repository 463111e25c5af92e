"""The command plsc-data: data sets looked at and changed."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from plsc.cli_common import Bar
from plsc.data import align, convert, health, make_pairs, open_images, split, write_pairs
from plsc.data.convert import check_free
from plsc.data.embeddings import atomic_file
from plsc.train.failures import EXIT_FAILURE, opening
from plsc.train.preflight import check_folder


def run(argv: Sequence[str]) -> int:
    """plsc-data COMMAND ...; 1 where `verify` found what spoils training."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    return _templates(args) if args.command == "templates" else _data(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plsc-data",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="PATH: a folder NAME/*.jpg, .zip of it, list (.txt), .rec, .tar, .parquet, .lmdb or .bin.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words, places in (
        ("verify", "read every image: broken ones, repeats, one picture under two labels, sizes, speed", ["path"]),
        ("stats", "what the labels say, in seconds", ["path"]),
        (
            "convert",
            "write PATH as TARGET (folder, .txt, .rec, .tar, x-{}.tar, .parquet, .lmdb), bytes kept",
            ["path", "target"],
        ),
        ("split", "write most classes of PATH to TRAIN and the others to TEST", ["path", "train", "test"]),
        ("pairs", "draw verification pairs, in LFW's format", ["path", "target"]),
        (
            "templates",
            "figures of IJB-B, IJB-C and the like: EMBEDDINGS of plsc-embed, MEDIA lines `image template medium`",
            ["embeddings", "media"],
        ),
        ("align", "cut the faces out of photographs, by five landmarks, and write them as TARGET", ["path", "target"]),
    ):
        command = commands.add_parser(
            name, help=words, description=words, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        for place in places:
            command.add_argument(place, metavar=place.upper())
        if name == "verify":
            command.add_argument("--limit", type=_count, default=0, help="look at so many images only, evenly spaced")
        if name == "split":
            command.add_argument("--share", type=float, default=0.1, help="of the classes, for TEST")
        if name == "pairs":
            command.add_argument("--num-pairs", type=_count, default=6000, help="half of them same, half different")
            command.add_argument("--folds", type=_count, default=10, help="stretches of the list, as LFW's ten")
        if name == "align":
            command.add_argument("--image-size", type=_count, default=112, help="of the squares")
            command.add_argument("--quality", type=_count, default=95, help="of the JPEGs; 0 writes PNG")
            command.add_argument("--landmarks", help="a file of `name x1 y1 ... x5 y5`; else faces are detected")
            command.add_argument("--save-landmarks", metavar="FILE", help="where to write those that were detected")
        if name in ("split", "pairs"):
            command.add_argument("--seed", type=_count, default=0, help="another one draws others")
        if name == "templates":
            command.add_argument("--pairs", metavar="FILE", help="lines `template template 0/1`: 1:1")
            command.add_argument("--gallery", metavar="FILE", nargs="+", default=[], help="lists of templates: 1:N")
            command.add_argument("--probes", metavar="FILE", help="what is searched for in each --gallery")
            command.add_argument("--landmarks", metavar="FILE", help="lines `image x1 .. y5 score`: weigh by scores")
            command.add_argument("--out", metavar="FILE", help="where the figures go as JSON")
            continue
        command.add_argument("--root", help="of a list: the folder that relative paths start at, if not its own")
        command.add_argument("--cache", help="of a .rec or .tar: a file to keep the index in")
        command.add_argument("--rebuild-index", action="store_true", help="of a .rec: make the .idx anew")
        command.add_argument("--image-column", metavar="NAME", help="of Parquet, if it is not `image`")
        command.add_argument("--label-column", metavar="NAME", help="of Parquet, if it is not `label`")
    return parser


def _count(text: str) -> int:
    """argparse's type for whole numbers from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number from 0")
    return int(text)


def _data(args: argparse.Namespace) -> int:
    """All but `templates`."""
    options = {"root": args.root, "cache": args.cache, "image": args.image_column, "label": args.label_column}
    options["index"] = "rebuild" if args.rebuild_index else None
    source = open_images(args.path, **{name: value for name, value in options.items() if value})
    if args.command in ("verify", "stats"):
        bar = Bar("reading")
        found = (
            health.verify(source, limit=args.limit, progress=bar) if args.command == "verify" else health.count(source)
        )
        print("\n".join(found.lines()))
        return 0 if found.sound else EXIT_FAILURE
    for name in ("target", "train", "test"):
        if hasattr(args, name):
            check_folder(os.path.dirname(getattr(args, name)) or ".", f"the folder of {name.upper()}")
            check_free(getattr(args, name))
    if getattr(args, "save_landmarks", None):
        check_free(args.save_landmarks)
    if args.command == "align":
        if args.landmarks:
            with opening("--landmarks", args.landmarks):
                faces = align.read_landmarks(args.landmarks, source)
        else:
            faces = align.find_faces(source, align.open_detector(), progress=Bar("finding faces"))
        if args.save_landmarks:
            align.write_landmarks(args.save_landmarks, source, faces)
        made = align.Aligned(source, faces, image_size=args.image_size, quality=args.quality)
        convert(made, args.target, progress=Bar("writing"))
        print(f"written: {args.target} ({len(made)} of {len(source)} images)")
    elif args.command == "convert":
        convert(source, args.target, progress=Bar("writing"))
        print(f"written: {args.target}")
    elif args.command == "split":
        kept, held = split(source, [args.train, args.test], share=args.share, seed=args.seed)
        print(f"written: {args.train} ({kept} classes), {args.test} ({held} classes)")
    else:
        pairs = make_pairs(source.labels, num_pairs=args.num_pairs, folds=args.folds, seed=args.seed)
        write_pairs(args.target, pairs, [source.name(i) for i in range(len(source))])
        print(f"written: {args.target} ({len(pairs)} pairs)")
    return 0


def _templates(args: argparse.Namespace) -> int:
    """Figures of the IJB protocol."""
    from plsc.train.template_figures import template_figures

    lists = {"pairs": args.pairs, "galleries": args.gallery, "probes": args.probes, "landmarks": args.landmarks}
    if args.out:
        check_folder(os.path.dirname(args.out) or ".", "the folder of --out")
        check_free(args.out)
    found = template_figures(args.embeddings, args.media, **lists)
    print("\n".join(found.lines()))
    if args.out:
        with atomic_file(args.out) as file:
            file.write(json.dumps(found.as_json(), indent=2, allow_nan=False).encode() + b"\n")
        print(f"written: {args.out}")
    return 0
