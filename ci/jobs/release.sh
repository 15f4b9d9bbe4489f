#!/usr/bin/env bash
# What the workflow "release" runs: checks that this commit is a release, and builds it into dist/.
set -euo pipefail
cd "$(dirname "$0")/../.."
make .venv/tools
exec .venv/bin/python -m ci.release
