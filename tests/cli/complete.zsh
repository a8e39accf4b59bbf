# zsh -f complete.zsh FOLDER LINE: what zsh offers at the end of LINE, a word a line, with _fusedmoe of
# that folder. Completion needs a terminal in which somebody types: after the tab the line is given up.
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "fpath=(${(q)1} \$fpath); autoload -Uz compinit; compinit -u -D"
zpty -w shell 'compadd() { local -a offered; builtin compadd -O offered "$@"; print -rl -- "off""er:"$^offered; builtin compadd "$@"; }'
zpty -w shell 'tab() { zle complete-word; BUFFER=print\ do\"\"ne; zle accept-line; }; zle -N tab; bindkey "^I" tab'
zpty -w -n shell "$2"$'\t'
zpty -r shell shown '*done*'
print -r -- "$shown" | tr -d '\r' | sed -n 's/^.*offer:\([^ ]*\).*/\1/p'
