//! Reads Rust source as far as the rules need it: which rooms a file's paths lead to, and whether it says `unsafe`.

/// The source with comments, strings and character literals replaced by blanks, line breaks kept.
pub fn code_only(text: &str) -> String {
    let source: Vec<char> = text.chars().collect();
    let mut code = String::with_capacity(text.len());
    let mut at = 0;
    while at < source.len() {
        let end = skipped_until(&source, at);
        if end == at {
            code.push(source[at]);
            at += 1;
        } else {
            code.extend(
                source[at..end]
                    .iter()
                    .map(|c| if *c == '\n' { '\n' } else { ' ' }),
            );
            at = end;
        }
    }
    code
}

/// Where the comment or literal that starts at `at` ends; `at` itself when none starts there.
fn skipped_until(source: &[char], at: usize) -> usize {
    let next = source.get(at + 1).copied().unwrap_or(' ');
    match source[at] {
        '/' if next == '/' => find(source, at, &['\n']),
        '/' if next == '*' => block_comment_end(source, at),
        '"' => string_end(source, at + 1),
        'r' if (next == '"' || next == '#') && !before_is_word(source, at) => {
            raw_string_end(source, at)
        }
        // A lifetime has no closing quote right after its first character.
        '\'' if next == '\\' => find(source, at + 3, &['\'']) + 1,
        '\'' if source.get(at + 2) == Some(&'\'') => at + 3,
        _ => at,
    }
    .min(source.len())
}

fn find(source: &[char], from: usize, wanted: &[char]) -> usize {
    (from..source.len())
        .find(|at| source[*at..].starts_with(wanted))
        .unwrap_or(source.len())
}

fn block_comment_end(source: &[char], at: usize) -> usize {
    let (mut depth, mut at) = (0, at);
    while at < source.len() {
        if source[at..].starts_with(&['/', '*']) {
            (depth, at) = (depth + 1, at + 2);
        } else if source[at..].starts_with(&['*', '/']) {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    at
}

fn string_end(source: &[char], mut at: usize) -> usize {
    while at < source.len() && source[at] != '"' {
        at += if source[at] == '\\' { 2 } else { 1 };
    }
    at + 1
}

fn raw_string_end(source: &[char], at: usize) -> usize {
    let hashes = source[at + 1..].iter().take_while(|c| **c == '#').count();
    if source.get(at + 1 + hashes) != Some(&'"') {
        return at; // a raw identifier
    }
    let mut end = vec!['"'];
    end.extend(std::iter::repeat_n('#', hashes));
    find(source, at + 2 + hashes, &end) + end.len()
}

/// `br"..."` is a literal too; `bar"` is not Rust.
fn before_is_word(source: &[char], at: usize) -> bool {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    at > 0 && word(source[at - 1]) && !(source[at - 1] == 'b' && (at < 2 || !word(source[at - 2])))
}

/// A word, or any other single character that is not white space; `::` is one token.
pub fn tokens(code: &str) -> Vec<(usize, String)> {
    let mut tokens: Vec<(usize, String)> = Vec::new();
    for (number, line) in code.lines().enumerate() {
        let mut rest = line.trim_start();
        while let Some(first) = rest.chars().next() {
            let word = rest
                .find(|c: char| !c.is_alphanumeric() && c != '_')
                .unwrap_or(rest.len());
            let length = if word > 0 {
                word
            } else if rest.starts_with("::") {
                2
            } else {
                first.len_utf8()
            };
            tokens.push((number + 1, rest[..length].to_owned()));
            rest = rest[length..].trim_start();
        }
    }
    tokens
}

/// Line and first name of every path that starts at the crate's root. `depth` is how many modules the file is below
/// the root, so that `super::super` is followed as well. `*` and `self` stand for the root itself. The arguments of a
/// macro may end up in a module that is not seen here: a `super` path leads to the root only if `rooms` has its name.
pub fn root_paths(
    tokens: &[(usize, String)],
    depth: usize,
    own_crate: &str,
    rooms: &impl Fn(&str) -> bool,
) -> Vec<(usize, String)> {
    let word = |at: usize| tokens.get(at).map_or("", |(_, text)| text.as_str());
    let mut found = Vec::new();
    // For each open brace, whether it opened an inline module.
    let mut modules: Vec<bool> = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        match word(at) {
            "{" => modules.push(at >= 2 && word(at - 2) == "mod"),
            "}" => drop(modules.pop()),
            _ => {}
        }
        let starts_path = at == 0 || word(at - 1) != "::" || at < 2 || !is_name(word(at - 2));
        let after = match word(at) {
            _ if !starts_path => None,
            "crate" => Some(at + 1),
            name if name == own_crate => Some(at + 1).filter(|at| word(*at) == "::"),
            "super" => after_supers(
                &word,
                at,
                depth + modules.iter().filter(|module| **module).count(),
            ),
            _ => None,
        };
        if let Some(after) = after {
            // `pub(crate)` and `pub(in crate)` lead nowhere; a bare `crate` (`use crate as x`) hides where it leads.
            if word(after) == "::" {
                let mut names = names_after(tokens, after + 1);
                names.retain(|(_, name)| word(at) != "super" || name == "*" || rooms(name));
                found.extend(names);
            } else if word(after) != ")" {
                found.push((tokens[at].0, "self".to_owned()));
            }
        }
        at += 1;
    }
    found
}

/// Behind `super::super::...` when that many lead to the root.
fn after_supers<'a>(
    word: &impl Fn(usize) -> &'a str,
    mut at: usize,
    depth: usize,
) -> Option<usize> {
    let mut supers = 1;
    while word(at + 1) == "::" && word(at + 2) == "super" {
        at += 2;
        supers += 1;
    }
    (supers >= depth).then_some(at + 1)
}

/// The name at `at`, or the first names of a group `{a::b, c}`.
fn names_after(tokens: &[(usize, String)], at: usize) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    if tokens.get(at).is_none_or(|(_, first)| first != "{") {
        found.extend(tokens.get(at).cloned());
        return found;
    }
    let (mut depth, mut fresh) = (1, true);
    for (line, text) in &tokens[at + 1..] {
        match text.as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            "," if depth == 1 => fresh = true,
            _ if fresh => {
                found.push((*line, text.clone()));
                fresh = false;
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    found
}

fn is_name(text: &str) -> bool {
    text.chars()
        .next()
        .is_some_and(|c| c.is_alphabetic() || c == '_')
        && text != "use"
}
