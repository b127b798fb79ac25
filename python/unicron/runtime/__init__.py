"""The edge: the only place with sockets, clocks, files and processes. Machines decide, this package
acts.
"""
