#!/usr/bin/env bash
# What the workflow "wheel" runs: the overlay wheel of every pin and the sdist into dist/, built
# twice; the bytes must be the same.
set -euo pipefail
cd "$(dirname "$0")/../.."
make .venv/tools
exec .venv/bin/python -m ci.release --dry-run
