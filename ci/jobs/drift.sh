#!/usr/bin/env bash
# What the workflow "drift" runs each night. Arguments go to ci.nightly_drift: --version X for
# another release than the newest, --issue to open or update the issue.
set -euo pipefail
cd "$(dirname "$0")/../.."
make .venv/installed
exec .venv/bin/python -m ci.nightly_drift "$@"
