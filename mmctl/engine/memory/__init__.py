"""Snapshots, pool state, pages, allocator replay, conflict, explanation."""
