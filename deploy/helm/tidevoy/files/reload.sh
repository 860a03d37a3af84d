# Sends SIGHUP to the control plane of this Pod when its configuration file has changed: sh reload.sh FILE
# An invalid file changes nothing, and the control plane logs the error.
set -eu
file="$1"
interval="${2:-5}"

# The Pod's containers share their processes.
reload() {
    for directory in /proc/[0-9]*; do
        command="$(tr '\0' ' ' <"$directory/cmdline" 2>/dev/null)" || continue
        case "$command" in
        *" serve --config $file "*) kill -HUP "${directory#/proc/}" || true ;;
        esac
    done
}

applied="$(cksum <"$file")"
echo "watching $file"
trap 'exit 0' TERM INT
while true; do
    sleep "$interval" &
    wait $!
    current="$(cksum <"$file")" || continue # the kubelet is replacing the file
    [ "$current" != "$applied" ] || continue
    echo "$file has changed; the control plane reloads it"
    reload
    applied="$current"
done
