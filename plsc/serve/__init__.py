"""The embedding and nearest-class service: bundles, exact search, a gallery, HTTP and a client."""

from plsc.serve.bundle import Bundle, Manifest, Threshold, write_bundle
from plsc.serve.client import Client, ServiceError
from plsc.serve.gallery import open_gallery
from plsc.serve.index import Index

__all__ = ["Bundle", "Client", "Index", "Manifest", "ServiceError", "Threshold", "open_gallery", "write_bundle"]
