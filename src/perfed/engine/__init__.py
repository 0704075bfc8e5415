"""Rounds on one machine: workers, executors, the store, the ledger and evaluation."""
