#!/usr/bin/env bash
# The browser that tests/browser drives: Debian's chromium. Installs it where this is root and apt has it; otherwise says
# why not. Never fails: without a browser those tests are skipped, with the reason.
set -u
for name in chromium chromium-browser google-chrome; do
	command -v "$name" >/dev/null && exit 0
done
if ! command -v apt-get >/dev/null; then
	echo "no browser: there is no apt-get here; install chromium, or the browser's tests are skipped" >&2
elif [ "$(id -u)" -ne 0 ]; then
	echo "no browser: installing one needs root (sudo apt-get install chromium), or the browser's tests are skipped" >&2
else
	echo "installing chromium for the browser's tests (half a minute, once)" >&2
	log=$(mktemp)
	export DEBIAN_FRONTEND=noninteractive
	{ timeout 120 apt-get update -q && timeout 600 apt-get install -y -q --no-install-recommends chromium; } >"$log" 2>&1 ||
		echo "no browser: apt-get failed ($(grep -m1 '^E:' "$log" || tail -n1 "$log")); the browser's tests are skipped" >&2
	rm -f "$log"
fi
exit 0
