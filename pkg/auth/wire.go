package auth

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// maxWire is the longest access token on the wire, in bytes: half of what the cloud takes as metadata of a
// stream by default (16 KiB). DecodeToken refuses a longer token before it allocates memory for it.
const maxWire = 8 << 10

// The names of the two JSON fields, as in SuperEdge.
const (
	wireNode  = "nodename"
	wireToken = "token"
)

// EncodeToken returns the OAuth2 access token with which node presents token. It is the JSON object
// {"nodename":…,"token":…}.
func EncodeToken(node string, token Secret) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // HTML escapes would make the token up to six times as long
	err := enc.Encode(struct {
		Node  string `json:"nodename"`
		Token string `json:"token"`
	}{node, token.Reveal()})
	if err != nil {
		panic(err) // two strings always encode
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// DecodeToken parses the result of EncodeToken. It is strict, because strangers send its input: each
// field exactly once and not empty, no other fields, and nothing behind the object. Its errors hold no
// part of the input. It checks neither the node name nor the token.
func DecodeToken(s string) (Credential, error) {
	if len(s) > maxWire {
		return Credential{}, fmt.Errorf("access token is %d bytes long; %d are allowed", len(s), maxWire)
	}
	if !utf8.ValidString(s) {
		return Credential{}, errors.New("access token is not UTF-8")
	}
	// The fields are read one by one. json.Unmarshal would accept a repeated field, and a field name in
	// another case.
	dec := json.NewDecoder(strings.NewReader(s))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return Credential{}, errors.New("access token is not a JSON object")
	}
	fields := make(map[string]string, 2)
	for dec.More() {
		key, err := jsonString(dec)
		if err != nil {
			return Credential{}, err
		}
		if key != wireNode && key != wireToken {
			return Credential{}, errors.New("access token has an unknown field")
		}
		if _, dup := fields[key]; dup {
			return Credential{}, fmt.Errorf("access token has the field %s twice", key)
		}
		if fields[key], err = jsonString(dec); err != nil {
			return Credential{}, err
		}
	}
	if _, err := dec.Token(); err != nil { // the closing brace
		return Credential{}, errors.New("access token is not a JSON object")
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return Credential{}, errors.New("access token has bytes after its JSON object")
	}
	for _, key := range []string{wireNode, wireToken} {
		if fields[key] == "" {
			return Credential{}, fmt.Errorf("access token has no %s", key)
		}
	}
	return Credential{Node: fields[wireNode], Token: Secret(fields[wireToken])}, nil
}

// jsonString reads the next JSON token, which must be a string.
func jsonString(dec *json.Decoder) (string, error) {
	t, err := dec.Token()
	if err != nil {
		return "", errors.New("access token is not a JSON object")
	}
	s, ok := t.(string)
	if !ok {
		return "", errors.New("access token has a field that is not a string")
	}
	return s, nil
}
