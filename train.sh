#!/usr/bin/env bash
# Sets up what is missing, then does what `simpletuner train` does. Run it from the repository root.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/scripts/environment.sh"

if [ -f config/config.env ]; then
  asked=${ENV:-}
  set -a # what it sets is meant for simpletuner, exported or not
  . config/config.env
  ENV=${asked:-${ENV:-}} # as for `simpletuner train`, the config that is asked for by hand counts for more
  set +a
fi
use_environment
exec simpletuner train "$@"
