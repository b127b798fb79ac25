"""Fault injection: kinds and points, and how a worker does one to itself exactly there."""
