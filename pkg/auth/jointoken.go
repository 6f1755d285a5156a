package auth

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"tunnel.example/tunnel/pkg/tunnel"
)

// JoinToken is what an edge needs to join: the cloud's address, how to recognise the cloud, and a
// secret by which the node gets a certificate. People copy and paste its text form.
type JoinToken struct {
	Address    string   // host:port that the edge dials
	ServerName string   // name in the cloud's certificate
	CA         [32]byte // SHA-256 of the DER of the CA certificate that signed the cloud's
	Node       tunnel.NodeName
	Nodes      NodePattern // set if the token is for several nodes; then Node is ""
	Secret     Secret      // the token of a line with the attribute join in the token file
}

const (
	// JoinPrefix marks a text as a join token of this version. Other texts that people paste by
	// mistake do not start with it.
	JoinPrefix = "tunnel1."
	// maxJoinToken is the longest text that is parsed, in bytes. Real join tokens have about 300.
	maxJoinToken = 2 << 10
)

// joinWire is the JSON object inside a join token.
type joinWire struct {
	Address    string `json:"address"`
	ServerName string `json:"servername"`
	CA         []byte `json:"ca"`
	Node       string `json:"node"`
	Secret     string `json:"secret"`
	Nodes      string `json:"nodes,omitempty"`
}

// Encode returns the text form: the prefix and the JSON object in unpadded base64url.
func (t JoinToken) Encode() Secret {
	text, err := json.Marshal(joinWire{
		t.Address, t.ServerName, t.CA[:], string(t.Node), t.Secret.Reveal(), string(t.Nodes),
	})
	if err != nil {
		panic(err) // strings and bytes always encode
	}
	return Secret(JoinPrefix + base64.RawURLEncoding.EncodeToString(text))
}

// ParseJoinToken reads the text form. It accepts only the exact text that Encode would write. Its
// errors hold no part of the text.
func ParseJoinToken(text string) (JoinToken, error) {
	if len(text) > maxJoinToken {
		return JoinToken{}, fmt.Errorf("the join token is %d bytes long; %d are allowed", len(text), maxJoinToken)
	}
	damaged := errors.New("the join token is damaged or incomplete; " +
		"paste all of the line that tunnel token create printed")
	body, ok := strings.CutPrefix(text, JoinPrefix)
	if !ok {
		return JoinToken{}, fmt.Errorf("this is no join token: one begins with %s; "+
			"make it on the cloud with tunnel token create", JoinPrefix)
	}
	inner, err := base64.RawURLEncoding.Strict().DecodeString(body)
	if err != nil {
		return JoinToken{}, damaged
	}
	var w joinWire
	if json.Unmarshal(inner, &w) != nil {
		return JoinToken{}, damaged
	}
	t := JoinToken{Address: w.Address, ServerName: w.ServerName, Secret: Secret(w.Secret)}
	if copy(t.CA[:], w.CA) != len(t.CA) {
		return JoinToken{}, damaged
	}
	switch {
	case w.Nodes != "" && w.Node != "":
		return JoinToken{}, damaged
	case w.Nodes != "":
		if t.Nodes, err = ParseNodePattern(w.Nodes); err != nil {
			return JoinToken{}, errors.New("the join token names no nodes")
		}
	default:
		if t.Node, err = tunnel.ParseNodeName(w.Node); err != nil {
			return JoinToken{}, errors.New("the join token names no node (RFC 1123)")
		}
		if err = t.Node.MayJoin(); err != nil {
			return JoinToken{}, fmt.Errorf("the join token: %w", err)
		}
	}
	if err := t.check(); err != nil {
		return JoinToken{}, err
	}
	// This refuses a repeated or unknown field, a field name in another case, and bytes after the object.
	if t.Encode() != Secret(text) {
		return JoinToken{}, damaged
	}
	return t, nil
}

// check checks address, server name and secret. Its errors hold no part of them.
func (t JoinToken) check() error {
	host, port, err := net.SplitHostPort(t.Address)
	if err != nil || !IsHost(host) {
		return errors.New("the join token's address is not host:port")
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return errors.New("the join token's address has no port from 1 to 65535")
	}
	if !IsHost(t.ServerName) {
		return errors.New("the join token's server name is neither a DNS name nor an IP address")
	}
	if err := checkToken(t.Secret.Reveal()); err != nil {
		return errors.New("the join token holds no usable secret")
	}
	return nil
}

// IsHost reports whether s may be the host of a cloud, for edges: a DNS name or an IP address.
func IsHost(s string) bool {
	if net.ParseIP(s) != nil {
		return true
	}
	_, err := tunnel.ParseNodeName(strings.ToLower(s)) // host names and node names have the same form
	return err == nil
}
