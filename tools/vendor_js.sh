#!/usr/bin/env bash
# Bundles the libraries of the web app's pages (tools/vendor_js/package.json) into nemorl/ui/static/vendor, with
# their licenses and the checksums of all files. Run it after a change of a version; nothing else needs npm.
set -euo pipefail
cd "$(dirname "$0")/vendor_js"
out=../../nemorl/ui/static/vendor
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cp package.json ./*.js "$work"
[[ -e package-lock.json ]] && cp package-lock.json "$work"
(cd "$work" && npm install --silent --no-audit --no-fund --ignore-scripts --omit-lockfile-registry-resolved)
cp "$work/package-lock.json" .

mkdir -p "$out"
rm -f "$out"/*
for name in preact uplot codemirror; do
  "$work/node_modules/.bin/esbuild" "$work/$name.js" --bundle --minify --format=esm --target=es2022 \
    --legal-comments=none --log-level=warning --outfile="$out/$name.js"
done
cp "$work/node_modules/uplot/dist/uPlot.min.css" "$out/uplot.css"
# esbuild is a tool; every other package is part of a bundle.
(
  cd "$work/node_modules"
  find . -name package.json -path '*node_modules*' -prune -o -name package.json -print | sort | while read -r file; do
    package=$(dirname "$file")
    package=${package#./}
    license=$(find "$package" -maxdepth 1 -iname 'license*' | head -n 1)
    if [[ $package == esbuild || $package == @esbuild/* || -z $license ]]; then continue; fi
    printf '%s %s\n\n' "$package" "$(node -p "require('./$file').version")"
    cat "$license"
    printf '\n\n'
  done
) >"$out/LICENSES.txt"
(cd "$out" && sha256sum -- *.js *.css LICENSES.txt >SHA256SUMS)
