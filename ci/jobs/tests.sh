#!/usr/bin/env bash
# What the workflow "tests" runs: the linters, and every test that needs no GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec make test
