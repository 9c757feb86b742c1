#!/usr/bin/env bash
# Installs what slow tests drive beside our own services: Chromium for the console's page, Prometheus for metrics,
# rules and dashboards. Idempotent. Needs Debian and root, or sudo without a password.
set -euo pipefail

missing=()
for package in chromium chromium-driver prometheus; do
  dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
"${as_root[@]}" apt-get update -qq
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
