package tunnel

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
)

// Selector chooses nodes by name. Each entry is a name in which "*" stands for any number of
// characters: "gw-*". An empty Selector chooses every node.
type Selector []string

// ParseSelector parses names that are separated by commas; spaces around a name are allowed. A
// lone "*" is the empty Selector.
func ParseSelector(s string) (Selector, error) {
	all := Selector(strings.Split(s, ","))
	for i, pattern := range all {
		pattern = strings.TrimSpace(pattern)
		all[i] = pattern
		switch {
		case pattern == "*" && len(all) == 1:
			return nil, nil
		case pattern == "*":
			return nil, errors.New(`"*" is every node: write it alone, or remove it`)
		}
		// With a letter for each star, a pattern must be a node name. This also rejects the other
		// special characters of path.Match.
		if _, err := ParseNodeName(strings.ReplaceAll(pattern, "*", "x")); err != nil {
			return nil, fmt.Errorf("%q is not a node's name or a pattern such as \"gw-*\"", pattern)
		}
	}
	return all, nil
}

// Chooses reports whether s chooses n.
func (s Selector) Chooses(n NodeName) bool {
	return len(s) == 0 || slices.ContainsFunc(s, func(pattern string) bool {
		ok, err := path.Match(pattern, string(n))
		return ok && err == nil
	})
}
