"""Vectors with their texts: one port, Milvus behind it, and a fake in memory that keeps the same contract.

Nobody above this package imports pymilvus, and no pymilvus error leaves it.

    port          what a store must do, and the checks that every store shares
    milvus        the store on a Milvus address
    memory        the store in this process, for tests and small trials
    lite          the actor that owns a Milvus Lite server
    lite_process  that server's process
"""

from cluster.vectors.lite import MilvusLiteServer, lite_server, open_store
from cluster.vectors.memory import MemoryVectors
from cluster.vectors.milvus import MilvusVectors
from cluster.vectors.port import CollectionSpec, Fingerprint, Match, Record, VectorStore

__all__ = [
    "CollectionSpec",
    "Fingerprint",
    "Match",
    "MemoryVectors",
    "MilvusLiteServer",
    "MilvusVectors",
    "Record",
    "VectorStore",
    "lite_server",
    "open_store",
]
