package auth

import (
	"errors"
	"strings"

	"tunnel.example/tunnel/pkg/tunnel"
)

// NodePattern names several nodes: a node name with one "*" in it, such as edge-*. The star stands for one or more
// letters, digits and "-", but for no dot: edge-* does not match edge-1.example.com.
type NodePattern string

// ParseNodePattern checks a pattern.
func ParseNodePattern(text string) (NodePattern, error) {
	if strings.Count(text, "*") != 1 {
		return "", errors.New(`a pattern of node names has one "*" in it, such as edge-*`)
	}
	if _, err := tunnel.ParseNodeName(strings.Replace(text, "*", "x", 1)); err != nil {
		return "", errors.New(`a pattern of node names is a node name (RFC 1123) with one "*" in it, such as edge-*`)
	}
	return NodePattern(text), nil
}

// Match reports whether node matches the pattern. A reserved name matches no pattern.
func (p NodePattern) Match(node tunnel.NodeName) bool {
	before, after, ok := strings.Cut(string(p), "*")
	name := string(node)
	if !ok || len(name) <= len(before)+len(after) || !strings.HasPrefix(name, before) || !strings.HasSuffix(name, after) {
		return false
	}
	star := name[len(before) : len(name)-len(after)]
	return !strings.Contains(star, ".") && name != sharedName && node.MayJoin() == nil
}
