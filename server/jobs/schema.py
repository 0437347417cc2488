"""The tables of files and batches. Knows SQL; knows no row's meaning beyond its columns."""

from __future__ import annotations

from typing import Final

SCHEMA_VERSION: Final = 1
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,              -- the tenant, empty where there are none
    created_at INTEGER NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    content BLOB,                     -- NULL: the lines of a batch, told apart by `state`
    batch_id TEXT,
    state INTEGER
) STRICT;
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    order_number INTEGER NOT NULL,
    status TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    window TEXT NOT NULL,
    metadata TEXT,
    errors TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    in_progress_at INTEGER,
    completed_at INTEGER,
    failed_at INTEGER,
    expired_at INTEGER,
    cancelling_at INTEGER,
    cancelled_at INTEGER,
    output_file_id TEXT,
    error_file_id TEXT,
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE IF NOT EXISTS lines (
    batch_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    body BLOB,                        -- the request, until it is answered
    state INTEGER NOT NULL DEFAULT 0, -- 0 waits, 1 answered, 2 failed
    result BLOB,
    PRIMARY KEY (batch_id, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS waiting_lines ON lines (batch_id, number) WHERE state = 0;
CREATE TABLE IF NOT EXISTS lease (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    holder TEXT NOT NULL,
    until REAL NOT NULL
) STRICT;
"""
WAITING: Final = 0
ANSWERED: Final = 1
FAILED: Final = 2
