"""The command plsc-serve, and the bundle that plsc-export writes for it."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

import plsc
from plsc.serve.bundle import MANIFEST, Bundle, Threshold, check_target, write_bundle
from plsc.serve.detect import DETECTORS, find_detector
from plsc.serve.gallery import open_gallery

EPILOG = (
    "The token is read from --token-file or PLSC_TOKEN, not from the command line, where other users of the machine "
    "see it. Images are expected as aligned crops unless --detector is given."
)


def run(argv: Sequence[str]) -> int:
    """plsc-serve BUNDLE [flags]; a ValueError says what the user got wrong."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        from plsc.serve.server import Address, read_token, serve
        from plsc.serve.service import Service
    except ImportError as error:
        raise ValueError(f"plsc-serve needs {error.name}; remedy: pip install 'plsc-torch[serve]'") from error
    address = Address(
        host=args.host,
        port=args.port,
        token=read_token(args.token_file),
        tls_certificate=args.tls_certificate,
        tls_key=args.tls_key,
    )
    address.check()
    settings = _settings(args)
    detector = find_detector(args.detector)
    if args.gallery is not None:
        _check_gallery(Path(args.gallery))
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # too many pixels are answered, not logged
    bundle = Bundle.open(_bundle_in(args.bundle), threads=args.threads, verify=not args.no_verify)
    about = bundle.manifest
    classes = _approximate(bundle, args.index, args.recall_queries)
    gallery = None
    if args.gallery is not None:
        try:
            gallery = open_gallery(args.gallery, dim=about.embedding_size, digest=about.model_digest)
        except OSError as error:
            raise ValueError(
                f"--gallery {args.gallery}: cannot be opened or made ({error.strerror or error}); expected a place "
                "that can be written and has room"
            ) from error
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.DEBUG if args.verbose else logging.INFO)
    for name in ("asyncio", "python_multipart", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)
    many = "" if gallery is None else f", gallery of {len(gallery)}{'' if gallery.writable else ' (read only)'}"
    print(f"{about.name}: {about.num_classes} classes as {about.storage}, embeddings of {about.embedding_size}{many}")

    def start() -> Service:
        return Service(bundle, settings=settings, gallery=gallery, classes=classes, detector=detector)

    serve(start, address, ready=lambda url: print(f"serving at {url} (Ctrl-C stops)", flush=True))
    return 0


def check_bundle(folder: str | Path) -> None:
    """Raises ValueError where bundle_run would be refused for what RUN/bundle holds: before anything is computed."""
    check_target(Path(folder) / "bundle")


def bundle_run(folder: str | Path, *, storage: str = "fp32") -> Path:
    """Puts what a run has exported together as RUN/bundle."""
    export = Path(folder) / "export"
    facts: dict[str, Any] = json.loads((export / "facts.json").read_text(encoding="utf-8"))
    pictures = export / "thumbnails.safetensors"
    return write_bundle(
        Path(folder) / "bundle",
        onnx=export / "model.onnx",
        centres=export / "centres.safetensors",
        name=facts["name"],
        plsc_version=plsc.__version__,
        flip=facts["flip"],
        thresholds=[Threshold(**one) for one in facts["thresholds"]],
        storage=storage,
        thumbnails=pictures if pictures.is_file() else None,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plsc-serve",
        description="Serves embeddings and nearest classes over HTTP, with a page at /.",
        epilog=EPILOG,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="what plsc-export RUN --to bundle wrote, or the RUN itself")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; others than loopback need a token")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--gallery", metavar="PATH", help="folder of entries, or a file that plsc-embed wrote")
    parser.add_argument("--token-file", metavar="FILE", help="file with the token that clients must send")
    parser.add_argument("--tls-certificate", metavar="FILE", help="PEM file; with --tls-key the service speaks HTTPS")
    parser.add_argument("--tls-key", metavar="FILE", help="PEM file")
    parser.add_argument("--detector", choices=DETECTORS, default="none", help="auto: the face of a photograph")
    parser.add_argument("--index", choices=("exact", "ivfpq", "hnsw"), default="exact", help="the others need faiss")
    parser.add_argument("--recall-queries", type=int, default=200, help="to measure an approximate index with")
    parser.add_argument("--threads", type=int, default=0, help="of the network; 0: all cores")
    parser.add_argument("--max-batch", type=int, default=16, help="images a run of the network")
    parser.add_argument("--delay-ms", type=float, default=5.0, help="an idle network waits so long for company")
    parser.add_argument("--queue", type=int, default=256, help="images that may wait; more is answered 429")
    parser.add_argument("--max-requests", type=int, default=128, help="at once; more is answered 429")
    parser.add_argument("--max-mb", type=float, default=16.0, help="of a request's body")
    parser.add_argument("--max-megapixels", type=float, default=16.0, help="of an image")
    parser.add_argument("--max-images", type=int, default=16, help="of a request")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds until a request is given up")
    parser.add_argument("--no-verify", action="store_true", help="do not read every byte to check the digests first")
    parser.add_argument("--verbose", action="store_true", help="a line a request")
    return parser


def _settings(args: argparse.Namespace) -> Any:
    from plsc.serve.bodies import Limits
    from plsc.serve.service import Settings

    for flag in ("max_batch", "queue", "max_requests", "max_images", "recall_queries"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')}: got {getattr(args, flag)}, expected at least 1")
    for flag in ("max_mb", "max_megapixels", "timeout"):
        if not 0 < getattr(args, flag) < math.inf:
            raise ValueError(f"--{flag.replace('_', '-')}: got {getattr(args, flag)}, expected more than 0, and finite")
    if not 0 <= args.delay_ms < math.inf:
        raise ValueError(f"--delay-ms: got {args.delay_ms}, expected 0 or more, and finite")
    if args.threads < 0:
        raise ValueError(f"--threads: got {args.threads}, expected 0 (all cores) or more")
    if args.queue < args.max_images:
        raise ValueError(
            f"--queue: got {args.queue}, expected at least the {args.max_images} images of a request; give a larger "
            "--queue or a smaller --max-images"
        )
    limits = Limits(
        max_bytes=int(args.max_mb * 2**20),
        max_pixels=int(args.max_megapixels * 1e6),
        max_images=args.max_images,
        seconds=args.timeout,
    )
    return Settings(
        limits=limits,
        max_batch=args.max_batch,
        delay=args.delay_ms / 1000,
        queue=args.queue,
        max_requests=args.max_requests,
    )


def _bundle_in(path: str) -> Path:
    """The bundle itself, or that of a run."""
    folder = Path(path)
    inside = folder / "bundle"
    return inside if not (folder / MANIFEST).is_file() and (inside / MANIFEST).is_file() else folder


def _check_gallery(path: Path) -> None:
    """Raises ValueError for a folder that is a run or (part of) a bundle, which an export replaces."""
    place = path.resolve()
    if place.is_file():
        return
    found = next((one for one in (place, *place.parents) if (one / MANIFEST).is_file()), None)
    if found is not None:
        where = "the bundle" if found == place else "a folder in the bundle"
        raise ValueError(
            f"--gallery {path}: got {where} {found}, which plsc-export replaces; expected a folder of its own elsewhere"
        )
    if (place / "bundle" / MANIFEST).is_file():
        raise ValueError(f"--gallery {path}: got a run, expected a folder of its own, such as {path / 'gallery'}")


def _approximate(bundle: Bundle, kind: str, queries: int) -> Any:
    if kind == "exact":
        return None
    from plsc.serve.approximate import ApproximateIndex

    print(f"index {kind}: made of {len(bundle.index)} classes, which takes a while", flush=True)
    index = ApproximateIndex.build(bundle.index, kind=kind)
    share = index.measure(bundle.index, num_queries=queries)
    print(f"index {kind}: recall@10 of {share:.4f} against exact search, {queries} queries")
    return index
