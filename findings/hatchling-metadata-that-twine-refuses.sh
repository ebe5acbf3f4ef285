#!/usr/bin/env bash
# hatchling: a project that nobody changed gets Metadata-Version 2.5, which twine 6.2 refuses before the upload.
#
# What happens: hatchling writes the newest version of the core metadata that it knows, whether or not the project uses
# one of its fields: 2.4 until 1.31, 2.5 (PEP 794) from 1.32 on. twine 6.2 says "'2.5' is not a valid metadata version",
# though packaging 26.4 beside it takes 2.5: twine replaces packaging's list of versions with one of its own, which ends
# at 2.4 (twine/package.py). One expects that a build backend leaves the form of the files alone between minor releases,
# and that a checker follows the library that it asks.
# So a build whose requirement is "hatchling" cannot be published any more by a job that pins twine, or by an action or an
# index that uses it.
# Seen: hatchling 1.33.0, twine 6.2.0, packaging 26.4, Python 3.11; twine 7.0.0 accepts the same file. Who meets it: who
# publishes a wheel, or takes it into an index of their own. What a project can do: `core-metadata-version = "2.4"` in
# [tool.hatch.build.targets.wheel] and in that of the sdist.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for name in build old new; do python3 -m venv "$name"; done
build/bin/pip install --quiet --disable-pip-version-check hatchling==1.33.0
old/bin/pip install --quiet --disable-pip-version-check twine==6.2.0 packaging==26.4
new/bin/pip install --quiet --disable-pip-version-check twine==7.0.0
mkdir project
echo 'value = 1' >project/example_of_metadata.py
cat >project/pyproject.toml <<'TOML'
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "example-of-metadata"
version = "1.0"
description = "A module of one line."
TOML
wheel() { # wheel FOLDER: build the project's wheel into FOLDER, and print its path
    (cd project && ../build/bin/hatchling build -t wheel -d "$work/$1" >/dev/null 2>&1)
    echo "$1"/*.whl
}
first=$(wheel first)
printf '\n[tool.hatch.build.targets.wheel]\ncore-metadata-version = "2.4"\n' >>project/pyproject.toml
second=$(wheel second)
form() { # form WHEEL: the first line of its metadata
    python3 -m zipfile -e "$1" "$1.files"
    head -1 "$1".files/*/METADATA
}
verdict() { # verdict PROGRAM WHEEL: what twine says, in one line without colours
    { COLUMNS=200 "$1/bin/twine" check "$2" 2>&1 || true; } | tr -s '\n ' ' ' | sed 's/\x1b\[[0-9;]*m//g; s/^Checking [^:]*: //'
}
echo "hatchling 1.33.0: $(form "$first"); with core-metadata-version: $(form "$second")"
old_first=$(verdict old "$first") old_second=$(verdict old "$second") new_first=$(verdict new "$first")
printf '%s\n' "twine 6.2.0: $old_first" "twine 6.2.0, core-metadata-version 2.4: $old_second" "twine 7.0.0: $new_first"
[[ $(form "$first") == "Metadata-Version: 2.5" && $(form "$second") == "Metadata-Version: 2.4" ]]
[[ $old_first == *"'2.5' is not a valid metadata version"* && $old_second == *PASSED* && $new_first == *PASSED* ]]
