"""
The standing attack on batchbound: kills, damaged files, failing models and full disks, seeded and counted.

``make attack`` runs it; docs/reliability.md has its table.
"""
