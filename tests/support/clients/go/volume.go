// Steps with large data.

package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
)

func (p plan) bigResult(prepared bool, rows int64) (string, error) {
	s, err := p.open(!prepared, nil)
	if err != nil {
		return "", err
	}
	defer s.close()
	found, err := s.QueryContext(context.Background(), "select n from numbers where n <= ?", rows)
	if err != nil {
		return "", err
	}
	defer found.Close()
	var count, sum, n int64
	for found.Next() {
		if err := found.Scan(&n); err != nil {
			return "", err
		}
		count++
		sum += n
	}
	if count != rows || sum != rows*(rows+1)/2 {
		return "", fmt.Errorf("%d rows, sum %d, %v", count, sum, found.Err())
	}
	return fmt.Sprintf("%d rows", count), found.Err()
}

func (p plan) bigValue(prepared bool) (string, error) {
	s, err := p.open(!prepared, nil)
	if err != nil {
		return "", err
	}
	defer s.close()
	blob := make([]byte, p.blob)
	if _, err := rand.Read(blob); err != nil {
		return "", err
	}
	err = first(
		func() error { return s.exec("drop table if exists blobs") },
		func() error { return s.exec("create table blobs (id int primary key, data longblob)") },
		func() error { return s.exec("insert into blobs values (?, ?)", 1, blob) },
	)
	if err != nil {
		return "", err
	}
	var data []byte
	var there string
	if err := s.QueryRowContext(context.Background(), "select data, sha2(data, 256) from blobs where id = ?", 1).Scan(&data, &there); err != nil {
		return "", err
	}
	sent, back := sha256.Sum256(blob), sha256.Sum256(data)
	if sent != back || hex.EncodeToString(sent[:]) != there {
		return "", fmt.Errorf("sent %x, the server has %s, %x came back", sent, there, back)
	}
	return fmt.Sprintf("%d bytes", len(data)), s.exec("drop table blobs")
}

func (p plan) loadData() (string, error) {
	s, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer s.close()
	return fmt.Sprintf("%d rows", p.loaded), first(
		func() error { return s.exec("drop table if exists loaded") },
		func() error { return s.exec("create table loaded (id int primary key, name varchar(50))") },
		func() error { return s.exec("load data local infile '" + p.load + "' into table loaded") },
		func() error { return s.expect(p.loaded, "select count(*) from loaded") },
		func() error { return s.expect(p.loaded*(p.loaded-1)/2, "select sum(id) from loaded") },
		func() error { return s.exec("drop table loaded") },
	)
}
