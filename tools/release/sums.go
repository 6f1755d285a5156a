package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"os"

	"aead.dev/minisign"
)

// sumsFile holds the checksums, in the format of sha256sum(1).
const sumsFile = "SHA256SUMS"

// addSums writes the checksums of all files of the release, and signs them if there is a key.
func (r *release) addSums() error {
	files, err := filesBelow(r.dir)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	for _, f := range sorted(files) {
		fmt.Fprintf(&b, "%x  %s\n", sha256.Sum256(f.data), f.name)
	}
	if err = r.put(sumsFile, b.Bytes()); err != nil || r.key == "" {
		return err
	}
	signature, err := r.sign(b.Bytes())
	if err != nil {
		return err
	}
	return r.put(sumsFile+".minisig", signature)
}

// sign returns minisign's signature of text. The time in its comment is the commit's.
func (r *release) sign(text []byte) ([]byte, error) {
	key, err := r.secretKey()
	if err != nil {
		return nil, fmt.Errorf("-key %s: %w", r.key, err)
	}
	reader := minisign.NewReader(bytes.NewReader(text))
	if _, err = io.Copy(io.Discard, reader); err != nil {
		return nil, err
	}
	trusted := fmt.Sprintf("timestamp:%d\tfile:%s\ttunnel %s", r.time.Unix(), sumsFile, r.version)
	return reader.SignWithComments(key, trusted, "signature of tunnel "+r.version), nil
}

// secretKey reads the key, with the password if it is encrypted.
func (r *release) secretKey() (minisign.PrivateKey, error) {
	text, err := os.ReadFile(r.key)
	if err != nil {
		return minisign.PrivateKey{}, err
	}
	if !minisign.IsEncrypted(text) {
		var key minisign.PrivateKey
		err = key.UnmarshalText(text)
		return key, err
	}
	if r.password == "" {
		return minisign.PrivateKey{}, fmt.Errorf("the key is encrypted: put its password into %s", passwordVariable)
	}
	return minisign.DecryptKey(r.password, text)
}
