# Stands in for a program while a launch script is read. The name that it is called by says which.
# It answers what a script asks about paths, dates and counts, and records everything else.
name=${0##*/} folder=${RL_LAUNCHES:-/records} number=1000
LC_ALL=C

record() {  # KIND WORD...: writes the next file of the folder, and leaves its number
    [[ ! -r $folder/.last ]] || read -r number <"$folder/.last"
    [[ $number == [1-9][0-9][0-9][0-9] ]] || number=1000
    set -C
    until { : >"$folder/$number"; } 2>/dev/null; do
        ((++number > 9999)) && exit 1
    done
    set +C
    printf '%s\n' "$number" >"$folder/.last"
    printf '%s\0' "$1" "$PWD" "${@:2}" >"$folder/$number"
}

unknown() {  # WORD...: what this command would print
    record unknown "$@"
    [[ -n $RL_LAUNCHES ]] || printf '@unknown%s@\n' "$number"
    end "$@"
}

end() {  # WORD...: ends as the reader has it: of an unknown command both outcomes are tried
    local key fails= failed=
    printf -v key '%s\37' "$@"
    [[ -r /stand_ins/.fails ]] && IFS= read -r -d '' fails </stand_ins/.fails
    [[ -z $RL_LAUNCHES && $fails == *$'\36'"$key"$'\36'* ]] || exit 0
    printf x >>"$folder/.failed"
    read -r failed <"$folder/.failed"
    ((${#failed} <= 64)) && exit 113  # not for ever: a script may wait until it succeeds
    exit 0
}

read_all() {  # into $text
    IFS= read -r -d '' text
}

case $name in
stand_in)  # of a command that is not found
    unknown "$@"
    ;;
python*)
    if [[ $1 == -c && $2 =~ ^[[:space:]]*(import|from)[[:space:]]+torch_npu ]]; then
        record assumed "$name" "$@"  # no such device here
        exit 1
    fi
    record launch "$name" "$@"
    [[ -n $RL_LAUNCHES ]] || printf '@unknown%s@\n' "$number"
    [[ $1 != -c ]] || end "$name" "$@"
    ;;
torchrun | accelerate | deepspeed)
    record launch "$name" "$@"
    ;;
env)
    while (($#)); do
        case $1 in
        -i | -) clear=-c ;;
        -u) unset "$2" && shift ;;
        --) ;;
        -S) set -- - $2 "${@:3}" ;;
        [A-Za-z_]*=*) given+=("$1") ;;
        -*) unknown "$name" "$@" ;;
        *) break ;;
        esac
        shift
    done
    if (($#)); then
        [[ -z $clear ]] || for each in $(compgen -e); do [[ $each == *SH*OPTS ]] || unset "$each"; done
        PATH=${PATH:-/usr/bin:/bin}
        for each in "${given[@]}"; do export "$each"; done
        exec "$@"
    fi
    while IFS= read -r -d '' each; do printf '%s\n' "$each"; done </proc/$$/environ
    ;;
nohup | srun | ray | uv | timeout | time | numactl | nsys | stdbuf | setsid | nice | sudo | conda | mpirun | docker | podman | singularity | apptainer)
    for ((i = 1; i <= $#; i++)); do
        case ${!i##*/} in
        python | python[0-9]* | torchrun | accelerate | deepspeed | bash | sh | env | nohup | srun | ray | uv | timeout | numactl | nsys | *.sh)
            exec "${@:i}"
            ;;
        esac
    done
    unknown "$name" "$@"
    ;;
tee)
    read_all
    printf '%s' "$text"
    ;;
cat)
    (($#)) || set -- -
    for file in "$@"; do
        case $file in
        -) read_all ;;
        -*) unknown "$name" "$@" ;;
        *) read_all <"$file" || [[ -r $file ]] || exit 1 ;;
        esac
        printf '%s' "$text"
    done
    ;;
date)
    [[ $1 == -u ]] && TZ=UTC0 && shift
    [[ -r /stand_ins/.now ]] && read -r NOW </stand_ins/.now  # all readings of a script have one
    case $#$1 in
    0) printf '%(%a %b %e %H:%M:%S %Z %Y)T\n' "${NOW:--1}" ;;
    1+*) printf "%(${1:1})T\n" "${NOW:--1}" ;;
    *) unknown "$name" "$@" ;;
    esac
    ;;
basename)
    [[ $1 == -- ]] && shift
    [[ $1 == -* ]] && unknown "$name" "$@"
    path=$1
    while [[ $path == */ && $path != / ]]; do path=${path%/}; done
    [[ $path == / ]] || path=${path##*/}
    [[ $path == "$2" ]] || path=${path%"$2"}
    printf '%s\n' "$path"
    ;;
dirname)
    [[ $1 == -- ]] && shift
    [[ $1 == -* ]] && unknown "$name" "$@"
    for path in "$@"; do
        while [[ $path == */ && $path != / ]]; do path=${path%/}; done
        case $path in
        /) ;;
        */*) path=${path%/*} && while [[ $path == */ && $path != / ]]; do path=${path%/}; done && path=${path:-/} ;;
        *) path=. ;;
        esac
        printf '%s\n' "$path"
    done
    ;;
readlink | realpath)
    [[ $1 == -f || $1 == -m || $1 == -e ]] && shift
    [[ $1 == -- ]] && shift
    [[ $# == 1 && $1 != -* ]] || unknown "$name" "$@"
    if [[ -d $1 ]]; then
        cd -P -- "$1" && pwd
    else
        path=/$1 && last=${1##*/}
        [[ $1 == */* ]] && path=${1%/*} || path=.
        cd -P -- "${path:-/}" && printf '%s/%s\n' "${PWD%/}" "$last"
    fi
    ;;
pwd)
    pwd "$@"
    ;;
which)
    type -P -- "$@" || unknown "$name" "$@"
    ;;
seq)
    for each in "$@"; do [[ $each =~ ^-?[0-9]+$ ]] || unknown "$name" "$@"; done
    case $# in
    1) first=1 step=1 last=$1 ;;
    2) first=$1 step=1 last=$2 ;;
    3) first=$1 step=$2 last=$3 ;;
    *) unknown "$name" "$@" ;;
    esac
    ((step)) || exit 1
    for ((i = first; step > 0 ? i <= last : i >= last; i += step)); do printf '%s\n' "$i"; done
    ;;
wc)
    option= && [[ $1 == -[lwc] ]] && option=$1 && shift
    [[ $1 == - ]] && shift
    [[ -n $option && $# -le 1 && $1 != -* ]] || unknown "$name" "$@"
    if (($#)); then read_all <"$1" || [[ -r $1 ]] || exit 1; else read_all; fi
    [[ $text =~ @unknown[0-9]+@ ]] && printf '%s\n' "${BASH_REMATCH[0]}" && exit
    case $option in
    -l) lines=${text//[!$'\n']/} && printf '%s' "${#lines}" ;;
    -w) read -r -d '' -a words <<<"$text" && : ; printf '%s' "${#words[@]}" ;;
    -c) printf '%s' "${#text}" ;;
    esac
    printf '%s\n' "${1:+ $1}"
    ;;
nproc)
    (($#)) && unknown "$name" "$@"
    while read -r key _; do [[ $key == processor ]] && ((++count)); done </proc/cpuinfo
    printf '%s\n' "${count:-1}"
    ;;
mkdir)
    for path in "$@"; do
        [[ $path == -* || -d $path ]] || paths+=("$path")
    done
    [[ -z ${paths[*]} ]] || record folders "${paths[@]}"
    ;;
*)
    unknown "$name" "$@"
    ;;
esac
