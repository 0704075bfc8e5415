"""The contract between methods and engines, and the pieces that methods are written with."""
